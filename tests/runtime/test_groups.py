"""Groups in a process alone; `tests/multiprocess/test_functional.py` has them on several."""

import types

import pytest

from tfdist.runtime import groups, world
from tfdist.runtime.groups import Group


def test_single_process_group_has_rank_zero():
    group = Group(iter([0]))
    assert (group.ranks, group.size, group.rank, group.members()) == ((0,), 1, 0, (0,))
    assert str(group) == "Group([0])"


@pytest.mark.parametrize("ranks", [[], [1], [-1], [0, 0], [0, 1]])
def test_nonexistent_or_repeated_ranks_raise(ranks):
    with pytest.raises(ValueError, match=r"one or more ranks from 0 to 0, each once; got .* call tfdist.init\(\)"):
        Group(ranks)


@pytest.mark.parametrize("ranks", [0, [0.5], ["0"]])
def test_what_is_no_rank_raises(ranks):
    with pytest.raises(TypeError, match=r"takes the ranks of its members, such as \[0, 1\]; got "):
        Group(ranks)


@pytest.fixture
def rank_2_of_4(monkeypatch):
    monkeypatch.setattr(groups, "world", types.SimpleNamespace(current=lambda: types.SimpleNamespace(rank=2, size=4)))


def test_group_keeps_the_order_of_its_ranks(rank_2_of_4):
    group = Group([3, 2, 0])
    assert (group.ranks, group.size, group.rank) == ((3, 2, 0), 3, 1)
    assert all(isinstance(rank, int) for rank in Group(range(4)).ranks)


def test_use_by_a_rank_outside_the_group_raises(rank_2_of_4):
    """Every process may make it, though."""
    group = Group([0, 1])
    assert group.size == 2
    for use in (group.members, lambda: group.rank):
        with pytest.raises(ValueError, match=r"rank 2 is not in Group\(\[0, 1\]\): .* `if tfdist.rank\(\) in group"):
            use()


def test_error_names_valid_range_and_given_ranks(rank_2_of_4):
    with pytest.raises(ValueError, match=r"one or more ranks from 0 to 3, each once; got \[0, 4\]"):
        Group([0, 4])


def test_world_size_is_one_outside_a_job():
    assert world.current().size == 1
