"""Training with compressed gradients: accuracy on digits, equality of ranks, what is reported, saved and refused."""

import json
import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupting import Interrupts
from sklearn.datasets import load_digits

import tfdist
from tfdist import compression as c

FOLDER = sys.argv[1]
digits = load_digits()
x, y = (digits.images / 16.0).astype("float32").reshape(-1, 64), digits.target
METHODS = {
    "none": None,
    "Float16": c.Float16(),
    "Float8": c.Float8(),
    "Int8": c.Int8(),
    "QSGD": c.QSGD(),
    "TernGrad": c.TernGrad(block=256),
    "OneBit": c.OneBit(),
    "SignSGD": c.SignSGD(),
    "RandomK": c.ErrorFeedback(c.RandomK(0.25)),
    "TopK": c.TopK(0.02),
    "DGC": c.DeepGradientCompression(0.02, momentum=0.9, warmup_steps=10),
    "Strom": c.Strom(density=0.02),
    "AtomoSVD": c.AtomoSVD(3),
    "PowerSGD": c.PowerSGD(4),
    "schedule": c.Schedule({0: c.FewerWorkers(1), 10: None, 20: c.TopK(0.1), 60: c.Int8()}),
    "by name": c.by_name({"bias": None, "dense": c.QSGD()}, otherwise=c.by_size({0: None, 500: c.TopK(0.1)})),
}
WITHOUT_MOMENTUM = ("DGC", "OneBit", "SignSGD")


def trained(compression, epochs=6, momentum=0.9, callbacks=(), seed=1, rate=None):
    keras.utils.set_random_seed(seed)
    strategy = tfdist.AllReduceStrategy(compression=compression)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu")]
        )
        model.add(keras.layers.Dense(10))
        model.compile(
            keras.optimizers.SGD(rate or (0.1 if momentum else 0.3), momentum=momentum),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(x[:1500], y[:1500], batch_size=128, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return strategy, model, history


def assert_alike(strategy, model):
    """Weights are equal to the last bit on all ranks."""
    for variable in model.trainable_variables:
        bits = tf.bitcast(tf.reshape(tf.convert_to_tensor(variable), [1, -1]), tf.int32)
        everyone = strategy.extended.exchange.all_gather(bits).numpy()
        np.testing.assert_array_equal(everyone, everyone[:1].repeat(strategy.size, 0))


def accuracies():
    results = {}
    for name in os.environ["TEST_METHODS"].split(","):
        method = METHODS[name]
        reporter = tfdist.callbacks.Communication()
        strategy, model, _ = trained(method, momentum=0.0 if name in WITHOUT_MOMENTUM else 0.9, callbacks=[reporter])
        assert_alike(strategy, model)
        accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)[1]
        ratio = reporter.history.get("compression_ratio", [1.0])[-1]
        results[name] = {"accuracy": accuracy, "ratio": ratio, "layers": sorted(strategy.compression())}
    print("RESULT", json.dumps(results), flush=True)


def momentum():
    """A method that has it in the optimizer's place gives it to biases, too: sending all is plain SGD with momentum."""
    _, expected, _ = trained(None, epochs=2, momentum=0.9, rate=0.05)
    method = c.DeepGradientCompression(1.0, momentum=0.9)
    strategy, model, _ = trained(method, epochs=2, momentum=0.0, rate=0.05)
    assert_alike(strategy, model)
    assert len(strategy.compression()) == 2
    for wanted, variable in zip(expected.trainable_variables, model.trainable_variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), wanted.numpy(), rtol=1e-3, atol=1e-5)


def goes_on():
    """Training that was interrupted goes on with the residuals and steps that it had; afterwards its files are gone.

    Of a method with state of its own and of one with random numbers; in sweeps, of two that have residuals alone, too.
    """
    for name in ("PowerSGD", "RandomK", *(("TopK", "Int8") if os.environ.get("TEST_SWEEP") else ())):
        backup = os.path.join(FOLDER, f"backup-{name}")
        with pytest.raises(KeyError, match="interrupted"):
            trained(METHODS[name], 4, callbacks=[keras.callbacks.BackupAndRestore(backup), Interrupts(2)])
        restored = keras.callbacks.BackupAndRestore(backup)
        strategy, model, _ = trained(METHODS[name], 4, callbacks=[restored], seed=2)
        assert_alike(strategy, model)
        states = [tensor.state for tensor in strategy.extended.compressor._tensors.values() if tensor]
        assert {state.step for state in states} == {4 * 12}, [state.step for state in states]
        assert not [file for file in os.listdir(FOLDER) if "compression-" in file]


def saved():
    """Residuals go with a saved model, and are refused where a rank's are missing or of another step."""
    strategy, model, _ = trained(METHODS["TopK"], epochs=1)
    path = os.path.join(FOLDER, "model.keras")
    model.save(path)
    kept = strategy.extended.compressor.file(path)
    assert kept.exists(), kept
    again = tfdist.AllReduceStrategy(compression=METHODS["TopK"])
    again.restore_compression(path)
    with again.scope():
        loaded = keras.models.load_model(path)
    loaded.fit(x[:128], y[:128], batch_size=128, verbose=0)
    steps = {tensor.state.step for tensor in again.extended.compressor._tensors.values() if tensor}
    assert steps == {13}, steps
    strategy.extended.bridge.all_reduce([tf.constant(1)])  # all have read
    if strategy.rank == 1:
        kept.unlink()
    again.restore_compression(path)
    steps = {tensor.state.step for tensor in again.extended.compressor._tensors.values() if tensor}
    assert steps == {0}, steps


def not_finite():
    """One rank's NaN reaches the optimizer of every rank, which skips the step; the next one is sound."""
    for name in ("TopK", "Int8", "PowerSGD", "SignSGD"):
        strategy = tfdist.AllReduceStrategy(compression=METHODS[name])
        with strategy.scope():
            weights = keras.Variable(np.ones((64, 64)))
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1.0)
            optimizer.build([weights])

        def step(gradient, optimizer=optimizer, weights=weights):
            optimizer.apply([gradient], [weights])

        run = tf.function(lambda gradient, strategy=strategy, step=step: strategy.run(step, args=(gradient,)))
        values = [weights.numpy()]
        for bad in (False, True, False):
            gradient = np.ones((64, 64), np.float32)
            gradient[3, 5] = np.nan if bad and strategy.rank == 1 else 1.0
            run(tf.constant(gradient))
            values.append(weights.numpy())
        assert (values[1] < values[0]).any()
        np.testing.assert_array_equal(values[2], values[1])
        assert (values[3] < values[2]).any()
        assert np.isfinite(values[3]).all()


def absent():
    """A gradient that is None on one rank only is told; on all, it is left alone."""
    strategy = tfdist.AllReduceStrategy(compression=METHODS["TopK"])
    with strategy.scope():
        used, unused = keras.Variable(np.ones((64, 64))), keras.Variable(np.ones((64, 64)))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([used, unused])

    def step(none):
        gradient = tf.ones((64, 64))
        optimizer.apply([gradient, None if none else gradient], [used, unused])

    tf.function(lambda: strategy.run(step, args=(True,)))()
    assert (unused.numpy() == 1).all()
    assert used.numpy().min() < 1
    try:
        tf.function(lambda: strategy.run(step, args=(strategy.rank == 0,)))()
    except (tfdist.MismatchError, tfdist.PeerLostError, tf.errors.OpError):
        print("TOLD", strategy.extended.group.failure, flush=True)
        sys.exit(5)


class ByRank(c.Policy):
    """Looks alike on all ranks, and chooses differently."""

    def __init__(self, rank):
        self.rank = rank

    def __repr__(self):
        return "ByRank()"

    def choose(self, name, shape):
        return c.TopK(0.1) if self.rank == 0 else c.Int8()


def differ():
    """Ranks whose policies choose differently are told which method the other has."""
    try:
        trained(ByRank(json.loads(os.environ["TF_CONFIG"])["task"]["index"]), epochs=1)
    except (tfdist.MismatchError, tfdist.PeerLostError, tf.errors.OpError) as error:
        print("TOLD", error, flush=True)
        sys.exit(5)


CASES = {
    "accuracies": accuracies,
    "momentum": momentum,
    "goes on": goes_on,
    "saved": saved,
    "not finite": not_finite,
    "absent": absent,
    "differ": differ,
}
CASES[os.environ["TEST_CASE"]]()
print("DONE", flush=True)
