"""The noise of gradients against its formula on each step, its closed form on a quadratic, and its definition."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks

import tfdist

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
keras.backend.set_floatx("float64")

ROWS, BATCH, WIDTH, EPOCHS = 3000, 24, 4, 2
generator = np.random.default_rng(0)
X = 3 + generator.normal(size=(ROWS, WIDTH)) * [1, 2, 0.5, 1]
WEIGHTS = np.array([3.5, 2.0, 3.2, 2.6])
PER_SAMPLE = 2 / WIDTH * (WEIGHTS - X)  # gradients of the mean over WIDTH of (w − x)²


class Offset(keras.layers.Layer):
    """Weights minus inputs."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), name="w")

    def call(self, inputs):
        return self.w - inputs


def still():
    return keras.optimizers.SGD(0.0)


def wrapped(**how):
    return lambda: tfdist.DistributedOptimizer(still(), **how)


def fit(strategy=None, callbacks=(), rows=ROWS, optimizer=still, epochs=EPOCHS, **compiling):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential([keras.layers.Input((WIDTH,)), Offset()])
        model.compile(optimizer(), "mse", **compiling)
    model.set_weights([WEIGHTS])
    inputs = X[:rows]
    batch = BATCH
    if strategy is None:  # each process has data of its own
        inputs, batch = inputs[rank::size], BATCH // size
    data = tf.data.Dataset.from_tensor_slices((inputs, 0 * inputs)).batch(batch)
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model, history.history


def by_formula(replicas, rows=ROWS):
    """Means of S and ‖g‖² over the steps in which two replicas or more have samples."""
    estimates = []
    for begin in range(0, rows, BATCH):
        parts = [part for part in np.array_split(PER_SAMPLE[begin : min(begin + BATCH, rows)], replicas) if len(part)]
        count = sum(map(len, parts))
        small = sum(len(part) / count * np.sum(part.mean(axis=0) ** 2) for part in parts)
        large = np.sum(np.concatenate(parts).mean(axis=0) ** 2)
        if len(parts) > 1:
            variance = (small - large) * count / (len(parts) - 1)
            estimates.append((variance, large - variance / count))
    return np.mean(estimates, axis=0)


def assert_measured(callback, expected, epochs=EPOCHS):
    for name, value in zip(("gradient_variance", "gradient_signal"), expected, strict=True):
        np.testing.assert_allclose(callback.history[name], [value] * epochs, rtol=1e-9)


def each_step():
    one, two, eagerly = ["CPU:0"], ["CPU:0", "CPU:1"], {"run_eagerly": True, "epochs": 1}
    for devices, rows, how in (
        (one, ROWS // 5, {}),
        (one, 25, eagerly),  # with a last batch of one row, which tells nothing
        (two, 25, {}),
        (two, 25, eagerly),
        (two, ROWS // 5, {"steps_per_execution": 2}),
    ):
        callback = tfdist.callbacks.GradientNoiseScale()
        _, history = fit(tfdist.AllReduceStrategy(devices=devices), [callback], rows, **how)
        assert_measured(callback, by_formula(size * len(devices), rows), how.get("epochs", EPOCHS))
        ratio = np.divide(callback.history["gradient_variance"], callback.history["gradient_signal"])
        np.testing.assert_allclose(history["gradient_noise_scale"], ratio)


def without_a_strategy():
    callback = tfdist.callbacks.GradientNoiseScale(batch_size=BATCH // size)
    fit(None, [callback], optimizer=wrapped(), rows=ROWS // BATCH * BATCH)
    if size == 1:
        assert callback.history == {}
        return
    parts = [
        PER_SAMPLE[: ROWS // BATCH * BATCH][process::size].reshape(-1, BATCH // size, WIDTH) for process in range(size)
    ]
    small = np.mean([np.sum(part.mean(axis=1) ** 2, axis=1) for part in parts], axis=0)
    large = np.sum(np.mean(parts, axis=(0, 2)) ** 2, axis=1)
    variance = (small - large) * BATCH / (size - 1)
    assert_measured(callback, (variance.mean(), (large - variance / BATCH).mean()))


def closed_form():
    """Compares measurements on batches with a quadratic's closed form, and diversity's definition, for all samples."""
    noise, diversity = tfdist.callbacks.GradientNoiseScale(), tfdist.callbacks.GradientDiversity()
    fit(tfdist.AllReduceStrategy(devices=["CPU:0", "CPU:1"]), [noise, diversity], epochs=1)
    covariance = np.cov(X.T)
    expected = np.trace(covariance) / np.sum((WEIGHTS - X.mean(axis=0)) ** 2)
    np.testing.assert_allclose(noise.history["gradient_noise_scale"], [expected], rtol=0.1)
    defined = ROWS * np.sum(PER_SAMPLE**2) / np.sum(np.sum(PER_SAMPLE, axis=0) ** 2)
    np.testing.assert_allclose(diversity.history["gradient_diversity"], [defined], rtol=0.1)


def sparse_and_mixed():
    """Rows that occur twice in a batch, and half precision with scaled losses."""
    keras.backend.set_floatx("float32")
    values = {}
    indices = np.random.default_rng(1).integers(0, 5, size=(48, 3))
    for name, policy in (("sparse", None), ("mixed", "mixed_float16")):
        strategy = tfdist.AllReduceStrategy(devices=["CPU:0", "CPU:1"])
        keras.utils.set_random_seed(0)
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.0)
            if policy:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)
            model = keras.Sequential(
                [
                    keras.layers.Input((3,), dtype="int32"),
                    keras.layers.Embedding(5, 4, dtype=policy),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1, dtype=policy),
                ]
            )
            model.compile(optimizer, "mse")
        callback = tfdist.callbacks.GradientNoiseScale()
        model.fit(indices, np.ones((48, 1)), batch_size=12, shuffle=False, verbose=0, callbacks=[callback])
        values[name] = callback.history["gradient_variance"][0]
        grads = []
        for row in indices:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.cast(model(row[None]), tf.float32) - 1))
            parts = tape.gradient(loss, [tensor.value for tensor in model.trainable_variables])
            grads.append(np.concatenate([np.reshape(tf.convert_to_tensor(tensor), -1) for tensor in parts]))
        replicas, variances = 2 * size, []
        for begin in range(0, 48, 12):
            parts = np.array_split(np.array(grads[begin : begin + 12]), replicas)
            small = sum(len(part) / 12 * np.sum(part.mean(axis=0) ** 2) for part in parts)
            variances.append((small - np.sum(np.mean(grads[begin : begin + 12], axis=0) ** 2)) * 12 / (replicas - 1))
        np.testing.assert_allclose(values[name], np.mean(variances), rtol=1e-4 if policy is None else 0.05)
    keras.backend.set_floatx("float64")


def afterwards():
    """Training that is measured is the same training, and later `fit` is not measured."""
    strategy = tfdist.AllReduceStrategy()
    model, _ = fit(strategy, [tfdist.callbacks.GradientNoiseScale()], optimizer=lambda: keras.optimizers.SGD(0.1))
    plain, _ = fit(tfdist.AllReduceStrategy(), optimizer=lambda: keras.optimizers.SGD(0.1))
    np.testing.assert_array_equal(model.get_weights(), plain.get_weights())
    assert strategy.extended.norms is None
    model.fit(X[:BATCH], 0 * X[:BATCH], batch_size=BATCH, verbose=0)


def refused():
    noise = tfdist.callbacks.GradientNoiseScale
    for bad in (0, 2.5, "8"):
        with pytest.raises(ValueError, match="a number of samples, at least 1"):
            noise(batch_size=bad)
    if size == 1:
        callback = noise()
        fit(tfdist.AllReduceStrategy(), [callback])
        assert callback.history == {}
        return
    with pytest.raises(ValueError, match="leave out gradient_accumulation_steps"):
        fit(
            tfdist.AllReduceStrategy(),
            [noise()],
            optimizer=lambda: keras.optimizers.SGD(0.0, gradient_accumulation_steps=2),
        )
    with pytest.raises(ValueError, match="sums gradients in each step"):
        fit(tfdist.LocalSGDStrategy(), [noise()])
    with pytest.raises(ValueError, match="without compression"):
        fit(tfdist.AllReduceStrategy(compression=tfdist.compression.Int8()), [noise()])
    with pytest.raises(ValueError, match="GradientNoiseScale needs batch_size=…, the number of a process's samples"):
        fit(None, [noise()], optimizer=wrapped())
    with pytest.raises(ValueError, match="needs gradients that are averaged"):
        fit(None, [noise(batch_size=2)], optimizer=wrapped(op=tfdist.Adasum))


run_checks(globals())
tfdist.barrier()
