import itertools

import ml_dtypes
import numpy as np
import pytest

from tfdist.parameter_server.protocol import hogwild_memory as memory
from tfdist.parameter_server.protocol.gradients import Shapes
from tfdist.parameter_server.protocol.hogwild_memory import Memory, Writer

SHAPES = Shapes([(5, 3), (), (4,)], [np.dtype(np.float32), np.dtype(np.float64), np.dtype(ml_dtypes.bfloat16)])


@pytest.fixture
def made():
    shared_memory = Memory.make(SHAPES)
    yield shared_memory
    shared_memory.where.close()


def opened_again(made):
    return Memory.open(made.where, SHAPES)


def test_writes_are_visible_in_another_mapping(made):
    first, second = Writer(made, 1), Writer(opened_again(made), 2)
    first.add(0, np.ones((5, 3), np.float32))
    first.add(1, np.float64(2.5))
    second.add_rows(0, np.array([1, 4]), np.ones((2, 3), np.float32))
    second.assign(2, np.arange(4, dtype=ml_dtypes.bfloat16))
    second.assign_rows(2, np.array([0]), np.array([7], ml_dtypes.bfloat16))
    for writer in (first, second):
        np.testing.assert_array_equal(writer.memory.arrays[0][:, 0], [1, 2, 1, 1, 2])
        assert writer.memory.arrays[1] == 2.5
        np.testing.assert_array_equal(writer.memory.arrays[2].astype(float), [7, 1, 2, 3])


def test_arrays_do_not_overlap(made):
    arrays = [made.counts, made.heads, made.rings, *made.arrays]
    bounds = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays)
    assert bounds[0][0] - made._bytes.ctypes.data >= 64
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    assert bounds[-1][1] <= made._bytes.ctypes.data + memory.size_of(SHAPES)
    assert all(begin % 64 == 0 for begin, _ in bounds)


def test_rows_changed_by_others_are_reported_once(made):
    first, second = Writer(made, 1), Writer(opened_again(made), 2)
    first.add_rows(0, np.array([1, 2]), np.ones((2, 3), np.float32))
    first.add_rows(0, np.array([2, 4]), np.ones((2, 3), np.float32))
    first.add_rows(2, np.array([3]), np.ones(1, ml_dtypes.bfloat16))
    assert len(first.changed_by_others([0])[0]) == 0, "its own"
    changed = second.changed_by_others([0, 1, 2])
    assert {variable: sorted(set(rows)) for variable, rows in changed.items()} == {0: [1, 2, 4], 1: [], 2: [3]}
    assert len(second.changed_by_others([0])[0]) == 0, "told once"
    first.add(0, np.ones((5, 3), np.float32))
    first.add_rows(2, np.array([1]), np.ones(1, ml_dtypes.bfloat16))
    changed = second.changed_by_others([0, 2])
    assert changed[0] is None
    assert list(changed[2]) == [1]


def test_overflow_of_a_ring_reports_all_rows(made):
    first, second = Writer(made, 1), Writer(opened_again(made), 2)
    rows = np.arange(5)
    for _ in range(memory.RING // 2 // 5 + 1):
        first.add_rows(0, rows, np.zeros((5, 3), np.float32))
    assert second.changed_by_others([0, 1]) == {0: None, 1: None}
    first.add_rows(0, np.array([3]), np.ones((1, 3), np.float32))
    assert list(second.changed_by_others([0])[0]) == [3]


def test_updates_are_counted_by_staleness(made):
    first, second = Writer(made, 1), Writer(opened_again(made), 2)
    first.count()
    first.count()
    second.count()
    second.changed_by_others([])
    second.count()
    np.testing.assert_array_equal(made.counts[1, :4], [1, 1, 0, 0])
    np.testing.assert_array_equal(made.counts[2, :4], [1, 0, 1, 0])
    for _ in range(2 * memory.DELAYS):
        first.count()
    assert made.counts[1].sum() == 2 + 2 * memory.DELAYS
    assert made.updates() == 4 + 2 * memory.DELAYS
