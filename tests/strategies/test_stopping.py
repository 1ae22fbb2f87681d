import pytest

from tfdist.strategies.stopping import Stopping, StopRequestsInRounds


def test_a_wish_counts_in_steps_of_fit_alone():
    stopping = Stopping()
    stopping.is_requested = True
    assert stopping.own() == 0
    with stopping.counted():
        assert stopping.own() == 1
    assert stopping.own() == 0


def test_what_any_process_wishes_ends_the_steps_of_all():
    stopping = Stopping()
    stopping.learn(0)
    assert not stopping.ended_by_request
    with pytest.raises(StopIteration):
        stopping.learn(1)
    assert stopping.ended_by_request
    assert not stopping.is_requested
    with stopping.counted():
        assert not stopping.ended_by_request, "the next step begins anew"


def test_an_exchange_that_tells_of_a_wish_ends_the_steps_before_the_next_one():
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
