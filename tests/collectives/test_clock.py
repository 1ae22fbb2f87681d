import types

import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import clock
from tfdist.collectives.clock import ROUNDS, clock_offset


class Clocks:
    """The ranks' clocks, some time apart, which advance when a rank is resumed and at no other time.

    Args:
        offsets: by rank, the value of its clock at the true time 0.
        delay: the time to resume a rank, given the rank and the number of times it was resumed before.
    """

    def __init__(self, offsets, delay):
        self.offsets, self.delay = offsets, delay
        self.now, self.rank = 0.0, 0

    def monotonic(self):
        return self.now + self.offsets[self.rank]

    def plan(self, rank):
        def schedule(comm, tag):
            inner = clock_offset()(comm, tag)
            resumed = 0
            while True:
                self.now += self.delay(rank, resumed)
                self.rank = rank
                resumed += 1
                try:
                    requests = next(inner)
                except StopIteration as stop:
                    return stop.value
                yield requests

        return schedule


@pytest.fixture
def measured(monkeypatch):
    def measure(offsets, delay, hosts=None):
        clocks = Clocks(offsets, delay)
        monkeypatch.setattr(clock, "time", types.SimpleNamespace(monotonic=clocks.monotonic))
        return simulate(len(offsets), clocks.plan, hosts=hosts or range(len(offsets)))

    return measure


@pytest.mark.parametrize("size", [1, 2, 5])
def test_offsets_are_accurate_when_delays_are_symmetric(measured, size):
    offsets = [64.0 * rank * (-1) ** rank for rank in range(size)]
    results, _ = measured(offsets, lambda rank, resumed: 1.0)
    for offset, result in zip(offsets, results, strict=True):
        assert abs(result + offset) <= 0.5  # the other rank is resumed once more on the way back
    assert results[0] == 0.0


def test_the_shortest_round_trip_counts(measured):
    """The way back takes 100 times as long as the way there, but once."""
    for quick in (1, 7, ROUNDS):
        results, _ = measured(
            [0.0, 1000.0], lambda rank, resumed, quick=quick: 100.0 if rank == 0 and resumed != quick else 1.0
        )
        assert abs(results[1] + 1000.0) <= 1.0
    results, _ = measured([0.0, 1000.0], lambda rank, resumed: 100.0 if rank == 0 else 1.0)
    assert abs(results[1] + 1000.0) > 10.0, "the delays are not what this test supposes"


@pytest.mark.parametrize("size", [2, 4])
def test_message_counts_equal_the_rounds(measured, size):
    _, communicators = measured([0.0] * size, lambda rank, resumed: 1.0)
    assert communicators[0].messages_sent == (size - 1) * (ROUNDS + 1)
    for communicator in communicators[1:]:
        assert communicator.messages_sent == ROUNDS


def test_clocks_of_one_machine_are_not_compared(measured):
    results, communicators = measured([0.0, 64.0, 0.0, 64.0], lambda rank, resumed: 1.0, hosts=[0, 1, 0, 1])
    assert results[0] == results[2] == 0.0
    assert results[1] == pytest.approx(-64.0, abs=0.5)
    assert results[3] == pytest.approx(-64.0, abs=0.5)
    assert communicators[2].messages_sent == 0
    assert communicators[0].messages_sent == 2 * (ROUNDS + 1)
