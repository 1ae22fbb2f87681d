"""The rows that a worker keeps, without servers, and a model of them that takes one key after the other."""

import numpy as np
import pytest

from tfdist.parameter_server.tables.row_cache import CachePolicy, RowCache

DIM = 2


def keys_of(*numbers):
    return np.array(numbers, np.int64)


def rows_of(keys, version=0.0):
    return np.stack([keys + version, -keys - version], axis=1).astype(np.float32)


def cache_of(rows=100, staleness=2, reads_own_writes=True):
    return RowCache(CachePolicy(rows, staleness, reads_own_writes), DIM, "float32")


def step(cache, keys, version=0.0, updates=True):
    """Looks keys up, and updates them to the next version. Returns the keys that had to be read."""
    lookup = cache.find(keys)
    assert lookup.values.shape == (len(keys), DIM)
    cache.put(lookup, rows_of(keys[lookup.missing], version))
    places, slots = cache.written(keys if updates else keys_of())
    cache.end_step(slots, rows_of(keys[places], version + 1))
    return keys[lookup.missing].tolist()


def test_repeated_key_is_cached_with_its_last_update():
    cache = cache_of()
    assert step(cache, keys_of(1, 2), version=0) == [1, 2]
    assert step(cache, keys_of(2, 3), version=1) == [2, 3], "a key that came once is not kept"
    assert step(cache, keys_of(2), version=2) == []
    lookup = cache.find(keys_of(2, 1))
    assert lookup.missing.tolist() == [1]
    np.testing.assert_array_equal(lookup.values[0], [5, -5], "of version 3")


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_a_row_is_read_again_when_it_is_stale(staleness):
    cache = cache_of(staleness=staleness)
    for _ in range(2):
        step(cache, keys_of(7), updates=False)  # read in steps 0 and 1
    for _ in range(staleness):
        assert step(cache, keys_of(7), updates=False) == []
    assert step(cache, keys_of(7), updates=False) == [7]


def test_own_writes_appear_late_without_reads_own_writes():
    cache = cache_of(staleness=2, reads_own_writes=False)
    for version in range(2):
        assert step(cache, keys_of(7), version) == [7]
    for _ in range(2):
        np.testing.assert_array_equal(cache.find(keys_of(7)).values, rows_of(keys_of(7), 1))
        assert step(cache, keys_of(7)) == []
    assert step(cache, keys_of(7)) == [7]


def test_least_recently_used_keys_are_evicted():
    cache = cache_of(rows=4)
    for number in (1, 2, 3, 4, 1, 1):
        step(cache, keys_of(number))
    step(cache, keys_of(5))
    assert len(cache) == 4
    assert cache.written(keys_of(1, 5, 2))[0].tolist() == [0]
    for _ in range(2):
        assert step(cache, keys_of(2)) == [2], "it was forgotten, and begins anew"


def test_cache_never_exceeds_its_size():
    cache = cache_of(rows=3)
    many = np.arange(10, dtype=np.int64)
    for _ in range(3):
        step(cache, many)
    assert len(cache) == 3


def test_clear_removes_all_rows():
    cache = cache_of()
    for _ in range(3):
        step(cache, keys_of(1))
    cache.clear()
    assert len(cache) == 0
    assert step(cache, keys_of(1)) == [1]


def test_empty_keys_are_accepted():
    cache = cache_of()
    for _ in range(2):
        assert step(cache, keys_of()) == []


@pytest.mark.parametrize("staleness", [1, 3])
def test_random_operations_equal_a_dictionary(staleness):
    """With room for all keys: values by key, with the step in which they were read; of keys that came twice."""
    generator = np.random.default_rng(staleness)
    cache, noted, kept, asked, hits = cache_of(staleness=staleness), set(), {}, 0, 0
    for clock in range(200):
        keys = np.unique(generator.integers(-(2**63), 2**63 - 1, 40)[: generator.integers(1, 4)] % 30)
        keys = np.unique(np.concatenate([keys, generator.integers(0, 30, generator.integers(0, 8))]))
        seen = cache.find(keys)
        rows, missing = seen.values, seen.missing
        expected = [place for place, key in enumerate(keys.tolist()) if kept.get(key, (-9, 0))[0] < clock - staleness]
        assert missing.tolist() == expected
        for place in sorted(set(range(len(keys))) - set(expected)):
            np.testing.assert_array_equal(rows[place], rows_of(keys, kept[int(keys[place])][1])[place])
        asked, hits = asked + len(keys), hits + len(keys) - len(missing)
        cache.put(seen, rows_of(keys[missing], clock))
        for key in keys[missing].tolist():
            if key in noted:
                kept[key] = (clock, clock)
            noted.add(key)
        pushed = keys[generator.random(len(keys)) < 0.7]
        places, slots = cache.written(pushed)
        assert set(pushed[places].tolist()) == set(pushed.tolist()) & kept.keys()
        for key in pushed[places].tolist():
            kept[key] = (clock, clock + 0.5)
        cache.end_step(slots, rows_of(pushed[places], clock + 0.5))
    assert (cache.asked, cache.found) == (asked, hits)
    assert hits > 100


@pytest.mark.parametrize(("rows", "staleness"), [(0, 1), (1, -1), (1.5, 1), (1, "2")])
def test_invalid_policies_raise(rows, staleness):
    with pytest.raises(ValueError, match=r"must be a whole number of at least [01]; got"):
        CachePolicy(rows, staleness)
