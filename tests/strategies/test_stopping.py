import pytest

from tfdist.strategies.stopping import Stopping, WishesInRounds


def test_a_wish_counts_in_steps_of_fit_alone():
    stopping = Stopping()
    stopping.is_wished = True
    assert stopping.own() == 0
    with stopping.counted():
        assert stopping.own() == 1
    assert stopping.own() == 0


def test_what_any_process_wishes_ends_the_steps_of_all():
    stopping = Stopping()
    stopping.learn(0)
    assert not stopping.is_found
    with pytest.raises(StopIteration):
        stopping.learn(1)
    assert stopping.is_found
    assert not stopping.is_wished
    with stopping.counted():
        assert not stopping.is_found, "the next step begins anew"


def test_an_exchange_that_tells_of_a_wish_ends_the_steps_before_the_next_one():
    stopping = Stopping()
    wishes = WishesInRounds(stopping)
    wishes.learn(0)
    stopping.check()
    stopping.is_wished = True
    assert wishes.own() == 1
    wishes.learn(1)
    with pytest.raises(StopIteration):
        stopping.check()
    assert stopping.is_found
    stopping.begin()
    stopping.check()
    assert wishes.own() == 0
