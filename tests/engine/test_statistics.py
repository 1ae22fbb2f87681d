import types

import pytest

from tfdist.engine import statistics
from tfdist.engine.beside import Totals
from tfdist.engine.statistics import Statistics


def measured(*beside):
    communicator = types.SimpleNamespace(messages_sent=1, bytes_sent=2)
    return Statistics(communicator, types.SimpleNamespace(totals=lambda: Totals(*beside)))


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(statistics, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_new_statistics_are_zero(clock):
    made = measured()
    clock.now += 5
    assert (made.collectives, made.communicating_seconds, made.waiting_seconds) == (0, 0.0, 0.0)


def test_communicating_and_waiting_overlap(clock):
    made = measured()
    made.communicating.start()
    clock.now += 1
    made.waiting.start()
    clock.now += 2
    made.waiting.stop()
    clock.now += 4
    made.communicating.stop()
    clock.now += 8
    assert made.communicating_seconds == 7
    assert made.waiting_seconds == 2


def test_unfinished_waits_are_counted(clock):
    """Readings only grow, also from one in the middle to one at the end."""
    made = measured()
    readings = []
    made.waiting.start()
    for _ in range(3):
        clock.now += 1
        readings.append(made.waiting_seconds)
    made.waiting.stop()
    readings.append(made.waiting_seconds)
    made.waiting.start()
    clock.now += 10
    readings.append(made.waiting_seconds)
    assert readings == [1, 2, 3, 3, 13]


def test_end_without_begin_is_ignored(clock):
    made = measured()
    made.communicating.stop()
    made.communicating.start()
    clock.now += 1
    made.communicating.stop()
    clock.now += 1
    made.communicating.stop()
    assert made.communicating_seconds == 1


def test_collectives_beside_the_engine_are_counted(clock):
    made = measured(3, 0.5, 4, 5)
    made.begun += 1
    assert (made.collectives, made.messages_sent, made.bytes_sent) == (4, 5, 7)
    assert (made.communicating_seconds, made.waiting_seconds) == (0.5, 0.5)
