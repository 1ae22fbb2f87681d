import re
import types
from pathlib import Path

import pytest

from tfdist.comm import idling
from tfdist.comm.idling import Contention, Idling
from tfdist.engine import shared_sums


def test_machine_code_idles_as_long():
    text = Path(shared_sums.__file__).with_suffix(".c").read_text()
    seconds = {name: float(value) for name, value in re.findall(r"\b([A-Z_]+) = ([\d.e-]+)[,;]", text)}
    assert seconds["SPIN"] == idling._SPIN_SECONDS
    assert seconds["LOST"] == idling._LOST_SECONDS
    assert seconds["CONTENDED"] == idling._CONTENDED_SECONDS
    assert seconds["SHORTEST_NAP"] == idling._SHORTEST_NAP
    assert seconds["LONGEST_NAP"] == idling._LONGEST_NAP
    assert seconds["LONGEST_NAP_OF_LONG_WAITS"] == idling._LONGEST_NAP_OF_LONG_WAITS
    assert seconds["PART_OF_WAIT"] == idling._PART_OF_WAIT


class Clock:
    """A thread's clocks, advanced by the test; sleeps take exactly the requested time."""

    def __init__(self):
        self.now = self.computed = 50.0
        self.naps = []

    def compute(self, seconds):
        self.now += seconds
        self.computed += seconds

    def off_core(self, seconds):
        self.now += seconds

    def sleep(self, seconds):
        self.naps.append(seconds)
        self.now += seconds

    def perf_counter(self):
        return self.now

    def thread_time(self):
        return self.computed


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(
        idling,
        "time",
        types.SimpleNamespace(perf_counter=clock.perf_counter, thread_time=clock.thread_time, sleep=clock.sleep),
    )
    return clock


def spins(waiting, clock, step=1e-4):
    """How long it spins."""
    begin = clock.now
    while waiting.spin():
        clock.compute(step)
        assert clock.now < begin + 1, "it does not end"
    return clock.now - begin


def test_spins_for_a_while_and_again_after_something_has_moved(clock):
    waiting = Idling(Contention())
    assert spins(waiting, clock) == pytest.approx(2e-3, abs=2e-4)
    clock.compute(5e-3)
    assert not waiting.spin()
    waiting.moved()
    assert spins(waiting, clock) == pytest.approx(2e-3, abs=2e-4)


def test_naps_grow_up_to_a_limit_and_begin_anew(clock):
    waiting = Idling(Contention())
    for _ in range(8):
        waiting.nap()
    assert clock.naps == pytest.approx([20e-6, 40e-6, 80e-6, 160e-6, 300e-6, 300e-6, 300e-6, 300e-6])
    waiting.moved()
    waiting.nap()
    assert clock.naps[-1] == pytest.approx(20e-6)


def test_naps_of_long_waits_are_a_part_of_the_wait(clock):
    waiting, begun = Idling(Contention()), clock.now
    while clock.now < begun + 1:
        waited = clock.now - begun
        waiting.nap()
        assert clock.naps[-1] <= max(300e-6, 0.01 * waited)
    assert clock.naps[-1] == pytest.approx(5e-3)
    assert len(clock.naps) < 600
    waiting.moved()
    waiting.nap()
    assert clock.naps[-1] == pytest.approx(20e-6)


def test_naps_are_not_counted_as_contention(clock):
    contention = Contention()
    waiting = Idling(contention)
    for _ in range(20):
        waiting.nap()
        waiting.spin()
    assert contention.until == 0.0


def test_contention_pauses_spinning_for_all_waits(clock):
    contention = Contention()
    waiting, other = Idling(contention), Idling(contention)
    assert waiting.spin()
    clock.off_core(1e-3)
    assert not waiting.spin()
    assert not Idling(contention).spin(), "a wait that begins now"
    clock.compute(0.1)
    other.moved()
    assert not other.spin()
    clock.compute(0.25)
    waiting.moved()
    assert waiting.spin(), "it is tried again"


def test_spinning_resumes_only_after_progress(clock):
    contention = Contention()
    contention.until = clock.now + 1e-3
    waiting = Idling(contention)
    clock.compute(1.5e-3)
    assert not waiting.spin()
    waiting.moved()
    assert waiting.spin()


def test_a_moment_off_the_core_is_no_contention(clock):
    contention = Contention()
    waiting = Idling(contention)
    for _ in range(5):
        clock.off_core(2e-4)
        assert waiting.spin()
        clock.compute(1e-4)
    assert contention.until == 0.0


def test_with_the_real_clocks_a_wait_ends_in_naps():
    waiting = Idling(Contention())
    while waiting.spin():
        pass
    waiting.nap()
    assert not waiting.spin()
