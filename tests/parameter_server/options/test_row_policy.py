"""Which rows are evicted, against a sorted list."""

import numpy as np
import pytest

from tfdist.parameter_server.options.row_policy import RowPolicy

NONE = np.empty(0, np.int64)


def evicted(policy, keys, uses, last_used, new=0, kept=NONE):
    keys, uses, last_used = (np.asarray(column, np.int64) for column in (keys, uses, last_used))
    return sorted(keys[policy.surplus(keys, uses, last_used, new, np.asarray(kept, np.int64))].tolist())


def test_least_recently_used_rows_are_evicted_first():
    policy = RowPolicy(max_rows=4)
    state = {"keys": [10, 11, 12, 13], "uses": [5, 9, 1, 7], "last_used": [3, 2, 2, 8]}
    assert evicted(policy, **state) == []
    assert evicted(policy, **state, new=1) == [12]
    assert evicted(policy, **state, new=2) == [11, 12]
    assert evicted(policy, **state, new=3) == [10, 11, 12]
    assert evicted(policy, **state, new=2, kept=[2, 2]) == [10, 11]
    assert evicted(policy, **state, new=9, kept=[2]) == [10, 11, 13]


def test_least_used_rows_are_evicted_first():
    policy = RowPolicy(max_rows=4, evict_first="least_used")
    state = {"keys": [10, 11, 12, 13], "uses": [5, 1, 1, 7], "last_used": [3, 6, 2, 1]}
    assert evicted(policy, **state, new=1) == [12]
    assert evicted(policy, **state, new=2) == [11, 12]
    assert evicted(policy, **state, new=4) == [10, 11, 12, 13]


def test_unbounded_table_evicts_nothing():
    assert evicted(RowPolicy(), [1, 2], [1, 1], [0, 0], new=1000) == []


def test_full_table_evicts_a_sixteenth_more():
    """A sixteenth of it."""
    keys = np.arange(64)
    assert evicted(RowPolicy(max_rows=64), keys, np.ones(64), keys, new=1) == [0, 1, 2, 3, 4]
    assert evicted(RowPolicy(max_rows=64), keys[:63], np.ones(63), keys[:63], new=1) == []


@pytest.mark.parametrize("first", ["least_recently_used", "least_used"])
@pytest.mark.parametrize("seed", range(5))
def test_evictions_from_random_tables_equal_a_sorted_list(first, seed):
    generator = np.random.default_rng(seed)
    keys = generator.permutation(500)[:100] - 250
    uses, last_used = generator.integers(0, 4, 100), generator.integers(0, 4, 100)
    kept = generator.integers(0, 100, 20)
    new = int(generator.integers(1, 60))
    scores = (last_used, uses) if first == "least_recently_used" else (uses, last_used)
    order = sorted(
        set(range(100)) - set(kept.tolist()), key=lambda slot: (scores[0][slot], scores[1][slot], keys[slot])
    )
    expected = sorted(keys[order[: new + 6]].tolist())
    assert evicted(RowPolicy(max_rows=100, evict_first=first), keys, uses, last_used, new, kept) == expected


def test_rows_unused_for_evict_after_steps_expire():
    policy = RowPolicy(evict_after=3)
    assert policy.expired(np.array([0, 5, 6, 7, 10]), 10).tolist() == [0, 1, 2]


def test_search_for_expired_rows_runs_eight_times_per_period():
    assert [now for now in range(1, 7) if RowPolicy(evict_after=3).is_time_to_search(now)] == [1, 2, 3, 4, 5, 6]
    assert [now for now in range(1, 21) if RowPolicy(evict_after=40).is_time_to_search(now)] == [5, 10, 15, 20]
    assert not any(RowPolicy().is_time_to_search(now) for now in range(1, 20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"admit_after": 0}, r"RowPolicy\(admit_after=…\) must be a whole number of at least 1; got 0"),
        ({"admit_after": None}, "admit_after"),
        ({"evict_after": 0}, "evict_after"),
        ({"max_rows": 1.5}, "max_rows"),
        ({"max_rows": True}, "max_rows"),
        ({"evict_first": "oldest"}, r"evict_first=…\) must be .*; got 'oldest'"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        RowPolicy(**arguments)
