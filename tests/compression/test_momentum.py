"""Momentum that a method applies in place of the optimizer, and that the optimizer's other variables get."""

import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tests.compression.test_compressor import gradient
from tfdist import compression as c
from tfdist.compression.compressor import Compressor, begin

rng = np.random.default_rng(6)
VARIABLES = {"a": ("a/kernel", (40, 50)), "b": ("a/bias", (50,)), "c": ("b/kernel", (3, 5))}


class Training:
    """SGD without momentum on several ranks, whose gradients go through a compressor each."""

    def __init__(self, compression, size, variables=VARIABLES):
        self.size = size
        self.shapes = [shape for _, shape in variables.values()]
        self.compressors = [Compressor(compression, rank, size) for rank in range(size)]
        self.tensors = []
        for compressor in self.compressors:
            compressor.register(variables)
            self.tensors.append([compressor.tensor(name, gradient()) for name in variables])
        self.weights = np.zeros(sum(map(np.prod, self.shapes)), np.float64)

    def step(self, vectors, rate=0.1):
        outs = [np.empty_like(vector) for vector in vectors]
        plans = [
            begin(tensors, vector, out, lambda nbytes: "ring")
            for tensors, vector, out in zip(self.tensors, vectors, outs, strict=True)
        ]
        simulate(self.size, lambda rank: plans[rank])
        for out in outs:
            assert out.tobytes() == outs[0].tobytes()
        self.weights -= rate * outs[0]
        return outs[0]


class Sgd:
    """With momentum, on one process."""

    def __init__(self, momentum):
        self.momentum, self.velocity, self.weights = momentum, 0.0, 0.0

    def step(self, total, rate=0.1):
        self.velocity = self.momentum * self.velocity + total
        self.weights = self.weights - rate * self.velocity


def gradients(training):
    return [rng.standard_normal(training.weights.size).astype(np.float32) for _ in range(training.size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_sending_all_is_sgd_with_momentum(momentum, size):
    training = Training(c.DeepGradientCompression(1.0, momentum), size)
    sgd = Sgd(momentum)
    for _ in range(30):
        given = gradients(training)
        training.step(given)
        sgd.step(np.sum(given, axis=0, dtype=np.float64))
        np.testing.assert_allclose(training.weights, sgd.weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "compression",
    [
        c.DeepGradientCompression(0.01, 0.9),
        c.by_name({"bias": None, "b/": c.WithoutFeedback(c.TopK(1.0))}, otherwise=c.DeepGradientCompression(0.01, 0.9)),
        c.Schedule({0: None, 5: c.DeepGradientCompression(0.01, 0.9)}),
        c.Schedule({0: c.FewerWorkers(3), 5: c.FewerWorkers(3, c.DeepGradientCompression(0.01, 0.9))}),
    ],
    ids=str,
)
def test_uncompressed_tensors_get_the_same_momentum(compression):
    training = Training(compression, 3)
    sgd, small = Sgd(0.9), slice(2000, None)
    for _ in range(20):
        given = gradients(training)
        training.step(given)
        sgd.step(np.sum(given, axis=0, dtype=np.float64))
        np.testing.assert_allclose(training.weights[small], sgd.weights[small], rtol=1e-4, atol=1e-4)
    compressed = ["a/kernel", "b/kernel"] if "bias" in repr(compression) else ["a/kernel"]
    assert list(training.compressors[0].traffic()) == compressed


def test_velocity_continues_across_schedule_changes():
    """Also of compressed variables: a gradient sent in full has the momentum of uncompressed training."""
    method = c.DeepGradientCompression(1.0, 0.9)
    training = Training(c.Schedule({0: None, 5: method, 10: c.FewerWorkers(2), 15: method}), 2)
    sgd = Sgd(0.9)
    for _ in range(20):
        given = gradients(training)
        training.step(given)
        sgd.step(np.sum(given, axis=0, dtype=np.float64))
        np.testing.assert_allclose(training.weights, sgd.weights, rtol=1e-4, atol=1e-4)


def test_nan_does_not_stay_in_the_velocity():
    training = Training(c.DeepGradientCompression(0.01, 0.9), 2)
    training.step(gradients(training))
    spoilt = gradients(training)
    spoilt[1][:] = np.nan
    assert np.isnan(training.step(spoilt)).all()
    assert np.isfinite(training.step(gradients(training))).all()


def test_velocities_are_saved(tmp_path):
    training = Training(c.DeepGradientCompression(0.01, 0.9), 1)
    for _ in range(3):
        training.step(gradients(training))
    training.compressors[0].save(tmp_path / "x")
    again = Training(c.DeepGradientCompression(0.01, 0.9), 1)
    again.compressors[0].load(tmp_path / "x")
    again.compressors[0].adopt()
    given = gradients(training)
    np.testing.assert_array_equal(again.step(given), training.step(given))


def test_small_tensors_are_not_handled_without_momentum():
    for compression in (c.DeepGradientCompression(0.01, 0.0), c.TopK(0.01)):
        compressor = Compressor(compression)
        compressor.register(VARIABLES)
        assert compressor.tensor("a", gradient()) is not None
        assert compressor.tensor("b", gradient()) is None


def test_methods_of_one_optimizer_agree():
    both = c.by_name({"a/": c.DeepGradientCompression(0.1, 0.5)}, otherwise=c.DeepGradientCompression(0.1, 0.9))
    with pytest.raises(ValueError, match=r"must agree on it; got \[0.5, 0.9\]"):
        Compressor(both).register(VARIABLES)
    compressor = Compressor(both)
    compressor.register({"a": VARIABLES["a"]})  # of two optimizers each may have its own
    compressor.register({"c": VARIABLES["c"]})
    assert [compressor.tensor(name, gradient()).momentum for name in ("a", "c")] == [0.5, 0.9]


def test_single_rank_applies_momentum_only():
    training, sgd = Training(c.DeepGradientCompression(0.01, 0.9), 1), Sgd(0.9)
    for _ in range(5):
        given = rng.standard_normal((40, 50)).astype(np.float32)
        sgd.step(given)
        np.testing.assert_allclose(training.tensors[0][0].alone(given), sgd.velocity, rtol=1e-5, atol=1e-5)
