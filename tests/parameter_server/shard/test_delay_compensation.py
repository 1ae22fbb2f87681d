"""The formula, element by element, against the paper's."""

import numpy as np
import pytest

from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.shard.delay_compensation import DelayCompensation

SHAPES = [(3,), (2,), (4, 2)]
FLOAT = np.dtype(np.float32)


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def vectors(generator):
    return [generator.normal(size=13).astype(FLOAT)]


def reading(values):
    return lambda: values


def compensation(**options):
    made = DelayCompensation(DelayCompensated(**options))
    made.begin([], Shapes(SHAPES, [FLOAT] * 3))
    return made


def expected(gradient, now, read, rate):
    return gradient + rate * gradient * gradient * (now - read)


def test_dense_gradients_are_corrected(generator):
    compensator = compensation(rate=0.5)
    read, now, gradient = vectors(generator), vectors(generator), vectors(generator)
    compensator.sent(2, 7, reading(read))
    corrected = compensator.corrected(2, 7, PushedGradients(("dense",) * 3, gradient), reading(now))
    np.testing.assert_allclose(corrected.vectors[0], expected(gradient[0], now[0], read[0], 0.5), rtol=1e-5)


def test_sparse_gradients_are_summed_and_corrected(generator):
    """The second variable has none; rows with equal indices are summed first."""
    compensator = compensation(rate=0.5)
    read, now = vectors(generator), vectors(generator)
    rows, indices = generator.normal(size=(3, 2)).astype(FLOAT), np.array([3, 1, 3])
    dense = generator.normal(size=3).astype(FLOAT)
    compensator.sent(0, 1, reading(read))
    corrected = compensator.corrected(
        0, 1, PushedGradients(("dense", "none", "sparse"), [dense], {2: (rows, indices)}), reading(now)
    )
    np.testing.assert_allclose(corrected.vectors[0], expected(dense, now[0][:3], read[0][:3], 0.5), rtol=1e-5)
    values, places = corrected.sparse[2]
    np.testing.assert_array_equal(places, [1, 3])
    table, before = now[0][5:].reshape(4, 2), read[0][5:].reshape(4, 2)
    np.testing.assert_allclose(values[0], expected(rows[1], table[1], before[1], 0.5), rtol=1e-5)
    np.testing.assert_allclose(values[1], expected(rows[0] + rows[2], table[3], before[3], 0.5), rtol=1e-5)


def test_adaptive_rate_uses_the_mean_of_squares(generator):
    compensator = compensation(rate=2.0, decay=0.9)
    squares = np.zeros(13)
    for version in range(3):
        read, now, gradient = vectors(generator), vectors(generator), vectors(generator)
        compensator.sent(0, version, reading(read))
        corrected = compensator.corrected(0, version, PushedGradients(("dense",) * 3, gradient), reading(now))
        squares = 0.9 * squares + 0.1 * gradient[0] ** 2
        rate = 2.0 / np.sqrt(squares + 1e-7)
        np.testing.assert_allclose(corrected.vectors[0], expected(gradient[0], now[0], read[0], rate), rtol=1e-4)


def test_correction_uses_parameters_of_the_read_version(generator):
    """With a step under way, a gradient is of the parameters before the last ones."""
    compensator = compensation(rate=0.5)
    first, second, now, gradient = (vectors(generator) for _ in range(4))
    compensator.sent(0, 1, reading(first))
    compensator.sent(0, 2, reading(second))
    for version, read in ((1, first), (2, second)):
        corrected = compensator.corrected(0, version, PushedGradients(("dense",) * 3, gradient), reading(now))
        np.testing.assert_allclose(corrected.vectors[0], expected(gradient[0], now[0], read[0], 0.5), rtol=1e-5)
    assert list(compensator._read[0]) == [2], "older ones are dropped"
    compensator.forget(0)
    unknown = PushedGradients(("dense",) * 3, gradient)
    assert compensator.corrected(0, 2, unknown, reading(now)) is unknown
