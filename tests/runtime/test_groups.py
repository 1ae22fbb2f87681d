"""Groups in a process alone; `tests/multiprocess/test_functional.py` has them on several."""

import types

import pytest

from tfdist.runtime import groups, world
from tfdist.runtime.groups import Group


def test_a_group_of_one():
    group = Group(iter([0]))
    assert (group.ranks, group.size, group.rank, group.members()) == ((0,), 1, 0, (0,))
    assert str(group) == "Group([0])"


@pytest.mark.parametrize("ranks", [[], [1], [-1], [0, 0], [0, 1]])
def test_ranks_that_do_not_exist_or_occur_twice(ranks):
    with pytest.raises(ValueError, match=r"one or more ranks from 0 to 0, each once; got .* call tfdist.init\(\)"):
        Group(ranks)


@pytest.fixture
def rank_2_of_4(monkeypatch):
    monkeypatch.setattr(groups, "world", types.SimpleNamespace(current=lambda: types.SimpleNamespace(rank=2, size=4)))


def test_the_order_is_the_groups_own(rank_2_of_4):
    group = Group([3, 2, 0])
    assert (group.ranks, group.size, group.rank) == ((3, 2, 0), 3, 1)
    assert all(isinstance(rank, int) for rank in Group(range(4)).ranks)


def test_only_members_may_use_it(rank_2_of_4):
    """Every process may make it, though."""
    group = Group([0, 1])
    assert group.size == 2
    for use in (group.members, lambda: group.rank):
        with pytest.raises(ValueError, match=r"rank 2 is not in Group\(\[0, 1\]\): .* `if tfdist.rank\(\) in group"):
            use()


def test_what_is_said_of_ranks_that_do_not_exist(rank_2_of_4):
    with pytest.raises(ValueError, match=r"one or more ranks from 0 to 3, each once; got \[0, 4\]"):
        Group([0, 4])


def test_alone_means_not_in_a_job():
    assert world.current().size == 1
