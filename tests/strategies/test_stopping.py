import pytest

from tfdist.strategies.stopping import Stopping, StopRequestsInRounds


def test_stop_request_counts_only_in_steps_of_fit():
    stopping = Stopping()
    stopping.is_requested = True
    assert stopping.own() == 0
    with stopping.step(trains=True):
        assert stopping.own() == 1
    assert stopping.own() == 0


def test_graphs_read_the_request_in_steps_of_fit_alone():
    stopping, seen = Stopping(), []
    stopping.is_requested = True

    def step(trains):
        with stopping.step(trains):
            seen.append((stopping.is_in_step, float(stopping.kept)))
            raise ZeroDivisionError

    for trains in (True, False):
        with pytest.raises(ZeroDivisionError):
            step(trains)
        assert not stopping.is_in_step
        assert float(stopping.kept) == 0
    assert seen == [(True, 1), (True, 0)]


def test_stop_request_of_any_process_ends_all_steps():
    stopping = Stopping()
    stopping.learn(0)
    assert not stopping.ended_by_request
    with pytest.raises(StopIteration):
        stopping.learn(1)
    assert stopping.ended_by_request
    assert not stopping.is_requested
    with stopping.step(trains=True):
        assert not stopping.ended_by_request, "the next step begins anew"


def test_stop_request_in_exchange_ends_before_next_step():
    stopping = Stopping()
    wishes = StopRequestsInRounds(stopping)
    wishes.learn(0)
    stopping.check()
    stopping.is_requested = True
    assert wishes.own() == 1
    wishes.learn(1)
    with pytest.raises(StopIteration):
        stopping.check()
    assert stopping.ended_by_request
    stopping.begin()
    stopping.check()
    assert wishes.own() == 0
