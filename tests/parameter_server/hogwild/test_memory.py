import itertools
import os

import ml_dtypes
import numpy as np
import pytest

from tfdist.parameter_server.gradients import Shapes
from tfdist.parameter_server.hogwild import memory
from tfdist.parameter_server.hogwild.memory import Memory, Writer

SHAPES = Shapes([(5, 3), (), (4,)], [np.dtype(np.float32), np.dtype(np.float64), np.dtype(ml_dtypes.bfloat16)])


@pytest.fixture
def made():
    found, opened = Memory.make(SHAPES)
    yield found, opened
    os.close(opened)


def opened_again(made):
    found, opened = made
    return Memory.open(os.getpid(), opened, found.token, SHAPES)


def test_what_one_writes_the_other_reads(made):
    one, other = Writer(made[0], 1), Writer(opened_again(made), 2)
    one.add(0, np.ones((5, 3), np.float32))
    one.add(1, np.float64(2.5))
    other.add_rows(0, np.array([1, 4]), np.ones((2, 3), np.float32))
    other.assign(2, np.arange(4, dtype=ml_dtypes.bfloat16))
    other.assign_rows(2, np.array([0]), np.array([7], ml_dtypes.bfloat16))
    for writer in (one, other):
        np.testing.assert_array_equal(writer.memory.arrays[0][:, 0], [1, 2, 1, 1, 2])
        assert writer.memory.arrays[1] == 2.5
        np.testing.assert_array_equal(writer.memory.arrays[2].astype(float), [7, 1, 2, 3])


def test_arrays_do_not_overlap(made):
    found, _ = made
    arrays = [found.counts, found.heads, found.rings, *found.arrays]
    bounds = sorted((one.ctypes.data, one.ctypes.data + one.nbytes) for one in arrays)
    assert bounds[0][0] - found._bytes.ctypes.data >= len(found.token)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    assert bounds[-1][1] <= found._bytes.ctypes.data + memory.size_of(SHAPES)
    assert all(begin % 64 == 0 for begin, _ in bounds)


def test_rows_that_others_have_changed(made):
    one, other = Writer(made[0], 1), Writer(opened_again(made), 2)
    one.add_rows(0, np.array([1, 2]), np.ones((2, 3), np.float32))
    one.add_rows(0, np.array([2, 4]), np.ones((2, 3), np.float32))
    one.add_rows(2, np.array([3]), np.ones(1, ml_dtypes.bfloat16))
    assert len(one.changed_by_others([0])[0]) == 0, "its own"
    changed = other.changed_by_others([0, 1, 2])
    assert {variable: sorted(set(rows)) for variable, rows in changed.items()} == {0: [1, 2, 4], 1: [], 2: [3]}
    assert len(other.changed_by_others([0])[0]) == 0, "told once"
    one.add(0, np.ones((5, 3), np.float32))
    one.add_rows(2, np.array([1]), np.ones(1, ml_dtypes.bfloat16))
    changed = other.changed_by_others([0, 2])
    assert changed[0] is None
    assert list(changed[2]) == [1]


def test_a_ring_that_was_written_over(made):
    one, other = Writer(made[0], 1), Writer(opened_again(made), 2)
    rows = np.arange(5)
    for _ in range(memory.RING // 2 // 5 + 1):
        one.add_rows(0, rows, np.zeros((5, 3), np.float32))
    assert other.changed_by_others([0, 1]) == {0: None, 1: None}
    one.add_rows(0, np.array([3]), np.ones((1, 3), np.float32))
    assert list(other.changed_by_others([0])[0]) == [3]


def test_staleness_is_counted(made):
    one, other = Writer(made[0], 1), Writer(opened_again(made), 2)
    one.count()
    one.count()
    other.count()
    other.changed_by_others([])
    other.count()
    np.testing.assert_array_equal(made[0].counts[1, :4], [1, 1, 0, 0])
    np.testing.assert_array_equal(made[0].counts[2, :4], [1, 0, 1, 0])
    for _ in range(2 * memory.DELAYS):
        one.count()
    assert made[0].counts[1].sum() == 2 + 2 * memory.DELAYS
    assert made[0].updates() == 4 + 2 * memory.DELAYS


@pytest.mark.parametrize("of", ["token", "shapes", "process", "file"])
def test_what_is_no_such_memory_is_not_opened(made, of, tmp_path):
    found, opened = made
    process, token, shapes = os.getpid(), found.token, SHAPES
    with open(tmp_path / "file", "wb+") as other:
        if of == "token":
            token = b"0" * len(token)
        elif of == "shapes":
            shapes = Shapes([(7,)], [np.dtype(np.float32)])
        elif of == "process":
            process = 1 << 30
        else:
            opened = other.fileno()
        assert Memory.open(process, opened, token, shapes) is None
    assert opened_again(made) is not None
