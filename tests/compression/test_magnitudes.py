"""Gradients from denormal to the largest numbers, by every method."""

import ml_dtypes
import numpy as np
import pytest

from tests.compression.methods import ALL
from tests.compression.test_reduction import World
from tests.sweeps import crossed
from tfdist import compression as c
from tfdist.compression.feedback import with_feedback

ROWS, COLUMNS = 16, 21
LARGEST = float(np.finfo(np.float32).max)


def vectors(kind, scale, size, dtype=np.float32):
    """Gradients whose sum has a largest element of about the given magnitude."""
    generator, elements = np.random.default_rng(3), ROWS * COLUMNS
    made = {
        "normal": lambda: scale * np.clip(generator.standard_normal(elements) / 4, -1, 1),
        "equal": lambda: np.full(elements, scale / size),
        "spike": lambda: np.where(np.arange(elements) == 7, scale / size, 0),
    }[kind]
    limit = float(ml_dtypes.finfo(dtype).max)
    return [np.clip(made(), -limit, limit).astype(dtype) for _ in range(size)]


def steps(world, *given):
    with np.errstate(all="ignore"):
        return [world.step(gradients) for gradients in given]


@pytest.mark.parametrize(("method", "kind", "size"), crossed(ALL, ["normal", "equal", "spike"], [1, 2, 3]), ids=str)
def test_finite_gradients_are_never_nan(method, kind, size):
    """Values that overflow become infinite or the largest number; at 1e37 none do."""
    for scale in (1e-45, 1e-38, 1e30, 1e37, 1e38, LARGEST):
        world = World(with_feedback(method), size, (ROWS, COLUMNS))
        for total in steps(world, *[vectors(kind, scale, size)] * 2):
            assert not np.isnan(total).any(), scale
            assert scale > 1e37 or np.isfinite(total).all(), scale
        assert np.isfinite(steps(world, vectors(kind, 1e-3, size))[0]).all() or scale > 1e37


def knows_magnitudes(method):
    absolute = method in (c.SignSGD(scaled=False), c.Strom(tau=1e-3)) or isinstance(method, c.Threshold)
    return absolute or getattr(method, "clip_norm", None) or (isinstance(method, c.Float16))


@pytest.mark.parametrize(("method", "size"), crossed([m for m in ALL if not knows_magnitudes(m)], [1, 2, 3]), ids=str)
def test_decoded_sum_scales_with_the_gradient(method, size):
    """By powers of two, so that rounding does not differ."""
    given = vectors("normal", 1.0, size)
    expected = steps(World(with_feedback(method), size, (ROWS, COLUMNS)), given, given)
    for exponent in (-95, 95, 121):
        scale = np.float32(2.0**exponent)
        scaled = [vector * scale for vector in given]
        results = steps(World(with_feedback(method), size, (ROWS, COLUMNS)), scaled, scaled)
        for decoded, other in zip(results, expected, strict=True):
            assert np.linalg.norm(decoded / scale - other) <= 1e-4 * np.linalg.norm(other), exponent


@pytest.mark.parametrize(
    ("method", "dtype", "size"), crossed(ALL, [np.float16, ml_dtypes.bfloat16], [1, 2, 3]), ids=str
)
def test_half_precision_gradients_never_become_nan(method, dtype, size):
    limits = ml_dtypes.finfo(dtype)
    for scale in (limits.smallest_subnormal, limits.smallest_normal, 1.0, limits.max):
        for kind in ("normal", "equal", "spike"):
            world = World(with_feedback(method), size, (ROWS, COLUMNS))
            for total in steps(world, *[vectors(kind, float(scale), size, dtype)] * 2):
                assert total.dtype == dtype
                assert not np.isnan(total.astype(np.float32)).any(), (scale, kind)
