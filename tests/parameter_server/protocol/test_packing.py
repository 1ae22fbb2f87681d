import ml_dtypes
import numpy as np
import pytest

from tests.compression.methods import ALL
from tfdist import compression as c
from tfdist.compression.state import State
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.protocol.packing import Packed, Packer, Unpacker, VariableSpec

SHAPES = [(40, 30), (30,), (50, 4)]
"""The first one has 40 of 80 rows."""
WHOLE = [VariableSpec("large/kernel", (80, 30)), VariableSpec("large/bias", (30,)), VariableSpec("table", (50, 4))]


def both(compression, dtype=np.float32, worker=0):
    """A packer, its unpacker, and the shapes. Small tensors are compressed, too."""
    shapes = Shapes(SHAPES, [np.dtype(dtype)] * 3)
    policy = compression if isinstance(compression, c.Policy) else c.skip_small(compression, elements=0, vectors=False)
    return Packer(policy, WHOLE, shapes, worker), Unpacker(policy, WHOLE, shapes), shapes


def gradients(shapes, seed=0):
    generator = np.random.default_rng(seed)
    return PushedGradients(("dense",) * 3, [generator.normal(size=1430).astype(shapes.layout().dtypes[0])])


def sent(packer, unpacker, given, step):
    packed = packer.packed(given, step)
    return packed, unpacker.received(packed.kinds, packed.arrays(), step)


@pytest.mark.parametrize("method", [method for method in ALL if not method.momentum], ids=repr)
def test_unpacked_gradients_equal_the_methods_own_decoding(method):
    """Over several steps, as methods have a state; with error feedback where they need it."""
    packer, unpacker, shapes = both(c.Schedule({0: method}), worker=3)
    (plain,) = {c.Schedule({0: method}).at(0)}
    names = [f"{place} {variable.path}" for place, variable in enumerate(WHOLE)]
    states = [State(name, seed=3, shape=shape) for name, shape in zip(names, SHAPES, strict=True)]
    for step in range(3):
        given = gradients(shapes, step)
        packed, unpacked = sent(packer, unpacker, given, step)
        assert packed.kinds == ("packed",) * 3
        assert unpacked.kinds == ("dense",) * 3
        for place, array in shapes.layout().arrays(given.vectors).items():
            states[place].scalers = plain.scalers(array.reshape(-1), states[place])
            expected = plain.decode(plain.encode(array.reshape(-1), states[place]))
            states[place].step += 1
            np.testing.assert_array_equal(shapes.layout().array(place, unpacked.vectors).reshape(-1), expected)


def test_compression_error_is_sent_later():
    packer, unpacker, shapes = both(c.TopK(0.1))
    total, arrived = np.zeros(1430), np.zeros(1430)
    for step in range(60):
        given = gradients(shapes, step if step < 10 else 10)
        if step >= 10:
            given.vectors[0][:] = 0
        _, unpacked = sent(packer, unpacker, given, step)
        total += given.vectors[0]
        arrived += unpacked.vectors[0]
    np.testing.assert_allclose(arrived, total, atol=1e-4)


def test_small_and_sparse_gradients_are_sent_uncompressed():
    packer, unpacker, shapes = both(c.skip_small(c.Int8(), elements=100))
    layout = shapes.layout(("dense", "dense", "sparse"))
    dense = [np.ones(length, np.float32) for length in layout.lengths]
    rows = np.full((2, 4), 5, np.float32), np.array([7, 7])
    packed, unpacked = sent(packer, unpacker, PushedGradients(("dense", "dense", "sparse"), dense, {2: rows}), 0)
    assert packed.kinds == ("packed", "dense", "sparse")
    assert sum(array.nbytes for array in packed.arrays()) < 2000
    assert unpacked.kinds == ("dense", "dense", "sparse")
    np.testing.assert_allclose(unpacked.vectors[0], 1, rtol=1e-2)
    np.testing.assert_array_equal(unpacked.sparse[2][0], rows[0])
    none = PushedGradients(("none", "dense", "none"), [np.ones(30, np.float32)])
    assert packer.packed(none, 1) is none
    assert unpacker.received(none.kinds, none.arrays(), 1).kinds == none.kinds


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64, np.int32])
def test_floats_are_compressed_and_integers_are_not(dtype):
    packer, unpacker, _ = both(c.Float16(), dtype)
    given = PushedGradients(("dense",) * 3, [np.ones(1430, dtype)])
    packed, unpacked = sent(packer, unpacker, given, 0)
    assert isinstance(packed, Packed) == (dtype != np.int32)
    assert unpacked.vectors[0].dtype == dtype
    np.testing.assert_array_equal(unpacked.vectors[0], given.vectors[0])


def test_schedules_go_by_the_workers_step():
    packer, unpacker, shapes = both(c.Schedule({0: None, 2: c.Int8()}))
    assert packer.packed(gradients(shapes), 1).kinds == ("dense",) * 3
    assert sent(packer, unpacker, gradients(shapes), 2)[0].kinds == ("packed",) * 3


def test_nan_gradients_arrive_as_nan():
    packer, unpacker, shapes = both(c.TopK(0.1))
    given = gradients(shapes)
    given.vectors[0][5] = np.nan
    _, unpacked = sent(packer, unpacker, given, 0)
    arrays = shapes.layout().arrays(unpacked.vectors)
    assert np.isnan(arrays[0]).all()
    assert np.isfinite(arrays[1]).all()


def test_invalid_packed_gradients_raise():
    packer, unpacker, shapes = both(c.PowerSGD(2))
    packed = packer.packed(gradients(shapes), 0)
    for wrong in (packed.rest[0][:-1], packed.rest[1], np.zeros(3, np.float32)):
        with pytest.raises(ValueError, match="cannot be decoded"):
            unpacker.received(packed.kinds, [wrong, *packed.rest[1:]], 0)
    with pytest.raises(ValueError, match="1 arrays of 3 gradients"):
        unpacker.received(packed.kinds, packed.rest[:1], 0)
    with pytest.raises(ValueError, match="was started without compression"):
        PushedGradients.received(packed.kinds, packed.rest, shapes)


@pytest.mark.parametrize("choice", [c.FewerWorkers(1), c.DeepGradientCompression(0.1, momentum=0.9)])
def test_methods_that_need_synchronized_workers_raise(choice):
    packer, _, shapes = both(choice)
    with pytest.raises(ValueError, match="take every step together"):
        packer.packed(gradients(shapes), 0)
