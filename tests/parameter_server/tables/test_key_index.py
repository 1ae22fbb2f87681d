"""The map from keys to slots against a dict."""

import numpy as np
import pytest

from tfdist.parameter_server.options.key_hash import mix
from tfdist.parameter_server.tables import key_index
from tfdist.parameter_server.tables.key_index import KeyIndex

EXTREMES = np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).min + 1, -1, 0, 1, np.iinfo(np.int64).max])


def contents(index):
    return dict(zip(index.keys[: index.size].tolist(), range(index.size), strict=True))


def check(index, model, absent):
    """Every key of a dict has its slot, and others have none."""
    keys = np.array(list(model), np.int64)
    np.testing.assert_array_equal(index.find(keys), np.array(list(model.values()), np.int64))
    assert (index.find(np.asarray(absent, np.int64)) == -1).all()
    assert contents(index) == model


def test_extreme_and_repeated_keys_are_found():
    index = KeyIndex()
    assert index.find(EXTREMES).tolist() == [-1] * 6
    assert index.add(EXTREMES).tolist() == [0, 1, 2, 3, 4, 5]
    assert index.find(EXTREMES[[5, 0, 5, 2, 2]]).tolist() == [5, 0, 5, 2, 2]
    check(index, {int(key): slot for slot, key in enumerate(EXTREMES)}, [2, -2, 1 << 40])


def test_empty_keys_are_accepted():
    index, none = KeyIndex(), np.empty(0, np.int64)
    assert index.add(none).tolist() == []
    assert index.find(none).tolist() == []
    holes, movers = index.remove(none)
    assert (holes.tolist(), movers.tolist(), index.size) == ([], [], 0)


def test_removed_keys_leave_their_slots_to_the_last_ones():
    index = KeyIndex()
    index.add(np.array([10, 11, 12, 13, 14]))
    holes, movers = index.remove(np.array([4, 1]))
    assert (holes.tolist(), movers.tolist()) == ([1], [3])
    check(index, {10: 0, 13: 1, 12: 2}, [11, 14])
    assert index.add(np.array([14, 15])).tolist() == [3, 4]
    check(index, {10: 0, 13: 1, 12: 2, 14: 3, 15: 4}, [11])


def test_keys_are_found_after_many_resizes():
    index, model, generator = KeyIndex(), {}, np.random.default_rng(0)
    for batch in (1, 0, 3, 30, 1, 500, 7, 20000, 1, 100):
        keys = np.setdiff1d(generator.integers(-(1 << 63), (1 << 63) - 1, batch), list(model))
        index.add(keys)
        model.update(zip(keys.tolist(), range(len(model), len(model) + len(keys)), strict=True))
        check(index, model, generator.integers(-(1 << 63), (1 << 63) - 1, 50))


def test_keys_with_colliding_hashes_are_found():
    """All begin at one bucket, or at two neighbours, until the table has 4096."""
    candidates = np.arange(1 << 20)
    start = mix(candidates) & np.uint64(4095)
    keys = candidates[(start == 77) | (start == 78)]
    assert len(keys) > 400
    index = KeyIndex()
    index.add(keys[:300])
    check(index, dict(zip(keys[:300].tolist(), range(300), strict=True)), keys[300:])
    index.remove(np.arange(0, 300, 2))
    assert (index.find(keys[:300:2]) == -1).all()
    np.testing.assert_array_equal(index.keys[index.find(keys[1:300:2])], keys[1:300:2])


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_equal_a_dict(seed):
    """Keys come and go, as when rows are evicted: from a small range, so that the same ones return."""
    generator = np.random.default_rng(seed)
    index, model = KeyIndex(), {}
    for _ in range(120):
        new = np.setdiff1d(generator.integers(-300, 300, generator.integers(0, 60)), list(model))
        generator.shuffle(new)
        slots = index.add(new)
        model.update(zip(new.tolist(), slots.tolist(), strict=True))
        by_slot = {slot: key for key, slot in model.items()}
        gone = generator.permutation(len(model))[: generator.integers(0, 60)]
        holes, movers = index.remove(gone)
        for slot in gone.tolist():
            del model[by_slot[slot]]
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            model[by_slot[mover]] = hole
        check(index, model, np.setdiff1d(np.arange(-300, 300), list(model)))


def test_keys_that_come_and_go_take_no_more_memory():
    """And leave half of the buckets empty, at which searches for absent keys end."""
    index = KeyIndex()
    for step in range(300):
        index.add(np.arange(100) + 100 * step)
        assert 2 * np.count_nonzero(index._buckets == -1) >= len(index._buckets)
        index.remove(np.arange(100))
    assert index.size == 0
    assert index._buckets.nbytes <= 4096
    assert len(index.keys) <= 256


def test_too_many_keys_raise(monkeypatch):
    monkeypatch.setattr(key_index, "_MOST_SLOTS", 10)
    index = KeyIndex()
    index.add(np.arange(8))
    with pytest.raises(OverflowError, match=r"11 keys; one server holds at most 10\. Use more servers"):
        index.add(np.arange(8, 11))
    check(index, {key: key for key in range(8)}, [8, 9, 10])
