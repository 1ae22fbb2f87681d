"""Which parts are possible, and what joined ones contain."""

import ml_dtypes
import numpy as np
import pytest

from tests.parameter_server.snapshots.states import assert_same_parts
from tfdist.parameter_server.snapshots.state import PartState, SnapshotError, join


def part(begin, end, rows=6, dtype=np.float32, columns=2, **slots):
    value = np.arange(begin * columns, end * columns).reshape(end - begin, columns).astype(dtype)
    return PartState("w", begin, end, rows, value, {name: value + slot for name, slot in slots.items()})


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_joined_parts_are_the_variable(dtype):
    parts = [part(*rows, dtype=dtype, momentum=1, velocity=2) for rows in ((0, 1), (1, 4), (4, 6))]
    assert_same_parts([join(parts)], [part(0, 6, dtype=dtype, momentum=1, velocity=2)])
    assert_same_parts([join(parts[1:])], [part(1, 6, dtype=dtype, momentum=1, velocity=2)])
    assert join(parts[:1]) is parts[0]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": np.float64, "momentum": 1},
        {"columns": 1, "momentum": 1},
        {"rows": 7, "momentum": 1},
        {"velocity": 1},
        {"momentum": 1, "velocity": 1},
    ],
)
def test_parts_that_differ_are_not_joined(other):
    """NumPy would convert dtypes silently."""
    with pytest.raises(SnapshotError, match="parts of the variable 'w' come from servers with different optimizers"):
        join([part(0, 2, momentum=1), part(2, 4, **other)])


@pytest.mark.parametrize(
    ("begin", "end", "rows", "shape"),
    [(0, 2, 6, (3, 2)), (4, 7, 6, (3,)), (-1, 2, 6, (3,)), (2, 1, 6, (3,)), (0, 1, 2, ()), (0, 2, 2, ())],
)
def test_invalid_bounds_raise(begin, end, rows, shape):
    with pytest.raises(ValueError, match="variable 'w' cannot have a value of shape"):
        PartState("w", begin, end, rows, np.zeros(shape), {})


def test_slots_of_other_shapes_need_whole_variables():
    slots = {"factor": np.zeros(2), "count": np.array(3)}
    assert PartState("w", 0, 3, 3, np.zeros((3, 2)), slots).is_whole
    assert PartState("w", 0, 1, 1, np.array(1.0), slots).is_whole
    with pytest.raises(ValueError, match=r"slot 'factor' of the variable 'w' has the shape \(2,\)"):
        PartState("w", 0, 3, 4, np.zeros((3, 2)), slots)
