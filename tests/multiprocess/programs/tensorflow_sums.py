"""`AllReduceStrategy(algorithm="tensorflow")` against plain Keras; a check for each name in TEST_CASES."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks
from comparing import assert_alike, assert_close

import tests.devices  # noqa: F401  (divides the CPU)
import tfdist
from tests.model_parallel.executed import executed, places

ROWS, BATCH = 22, 8  # a last batch of 6 rows, which three processes share unevenly
tfdist.init()
strategy = tfdist.AllReduceStrategy(algorithm="tensorflow", devices=["CPU:0"])
rank, size = strategy.rank, strategy.size
generator = np.random.default_rng(0)
TOKENS, X, Y = generator.integers(0, 12, (ROWS, 6)), generator.normal(size=(ROWS, 7)), generator.normal(size=(ROWS, 2))
layers = keras.layers


def dense():
    return keras.Sequential(
        [
            layers.Input((7,)),
            layers.Dense(256),
            layers.Dense(8, "tanh"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(2),
        ]
    )


def wide():
    """Gradients that fill several buckets, of which some have equal shapes."""
    return keras.Sequential([layers.Input((7,)), *(layers.Dense(400, "tanh") for _ in range(4)), layers.Dense(2)])


def placed():
    """Layers on devices, of which one is named as TensorFlow names it here."""
    with tfdist.device_scope("CPU:1"):
        hidden = layers.Dense(8, "tanh")
    with tfdist.device_scope(tf.constant(0).device):
        return keras.Sequential([layers.Input((7,)), hidden, layers.Dense(2)])


def words():
    """Gradients of an embedding are sparse, and those of the other layers are not."""
    return keras.Sequential([layers.Input((6,)), layers.Embedding(12, 4), layers.LSTM(4), layers.Dense(2)])


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def compiled(make, optimizer=momentum, made=strategy, **how):
    keras.utils.set_random_seed(1)
    with made.scope():
        model = make()
        model.compile(optimizer(), "mse", run_eagerly=not isinstance(made, tfdist.AllReduceStrategy), **how)
    return model


def plain(make, optimizer=momentum):
    return compiled(make, optimizer, tf.distribute.get_strategy())


def fit(model, x, epochs=2):
    return model.fit(x, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def assert_as_plain(make, x, optimizer=momentum, **how):
    model = compiled(make, optimizer, **how)
    losses = fit(model, x)
    assert_alike(model)
    if rank == 0:
        other = plain(make, optimizer)
        np.testing.assert_allclose(losses, fit(other, x), rtol=1e-9)
        assert_close(model, other.get_weights())
    tfdist.barrier()


def models():
    """Gradients do not pass the engine, which sums the moments of a batch."""
    model = compiled(dense, steps_per_execution=2)
    fit(model, X, 1)
    before = strategy.communication()["bytes"]
    fit(model, X, 1)
    sent = strategy.communication()["bytes"] - before
    of_gradients = 3 * sum(weight.numpy().nbytes for weight in model.trainable_weights)
    assert 3 * sent < of_gradients, (sent, of_gradients)
    if rank == 0:
        other = plain(dense)
        fit(other, X)
        assert_close(model, other.get_weights())
    tfdist.barrier()
    assert_as_plain(words, TOKENS)


def optimizers():
    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, global_clipnorm=0.1), 256.0, 3)

    assert_as_plain(dense, X, scaled)
    assert_as_plain(dense, X, lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2))


def buckets():
    assert_as_plain(wide, X)
    model = compiled(wide, made=tfdist.AllReduceStrategy(algorithm="tensorflow", devices=["CPU:1"]))
    operations = executed(lambda: fit(model, X, 1))
    sums = places(operations, "CollectiveReduce")
    assert sums.keys() == {"CPU:1"}, sums
    assert sums["CPU:1"] >= 4, "the large gradients are buckets of their own"
    assert set(places(operations, "PyFunc")) <= {"CPU:0"}, places(operations, "PyFunc")


def features():
    """What is beside the sums: the names of all devices are others here than with other algorithms."""
    assert_as_plain(placed, X)
    assert_as_plain(wide, X, jit_compile=True)
    options = {"devices": ["CPU:1", "CPU:2"]}, {"cpu_relocation": True}, {"devices": ["CPU:1"], "float32_sums": True}
    for how in options:
        assert_as_plain(dense, X, made=tfdist.AllReduceStrategy(algorithm="tensorflow", **how))


def compressed():
    """Gradients pass the engine, which compresses them."""
    made = tfdist.AllReduceStrategy(algorithm="tensorflow", devices=["CPU:1"], compression=tfdist.compression.Int8())
    model, other = compiled(wide, made=made), compiled(wide)
    losses = fit(model, X)
    np.testing.assert_allclose(losses, fit(other, X), rtol=0.02)
    assert_alike(model)


def loops():
    """Steps of one's own, in a graph and eagerly; each process has its share of the batch."""
    model, other = compiled(words), plain(words)
    share, whole = slice(rank, 6 * size, size), slice(6 * size)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 2 / (6 * size)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for run in (strategy.run, tf.function(strategy.run)):
        run(step, (tf.constant(TOKENS[share]), tf.constant(Y[share])))
        other.train_on_batch(TOKENS[whole], Y[whole])
    assert_alike(model)
    assert_close(model, other.get_weights())


def strategies():
    """A second strategy has the first one's connections, and its steps alternate with the first one's."""
    second = tfdist.AllReduceStrategy(algorithm="tensorflow", devices=["CPU:0"])
    cases = [(dense, X), (words, TOKENS)]
    pairs = [(compiled(make, made=made), x) for made in (strategy, second) for make, x in cases]
    for _ in range(2):
        for model, x in pairs:
            fit(model, x, 1)
    for model, _ in pairs:
        assert_alike(model)
    for (model, _), (like, _) in zip(pairs[:2], pairs[2:], strict=True):
        assert_close(model, like.get_weights())


def refused():
    divided = {"delay": 1}, {"shard": "optimizer"}, {"shard": "weights"}, {"mesh": tfdist.Mesh(data=1, model=size)}
    for how in divided:
        with pytest.raises(ValueError, match=rf"{next(iter(how))}=.* does not work with algorithm='tensorflow'"):
            tfdist.AllReduceStrategy(algorithm="tensorflow", **how)
    group = tfdist.Group(list(reversed(range(size))))
    with pytest.raises(RuntimeError, match=r"sums among Group\(.*\) in this process, and cannot among"):
        tfdist.AllReduceStrategy(algorithm="tensorflow", devices=["CPU:0"], group=group)


def endless():
    """Trains until it is killed or stopped, and says which epochs have ended."""
    model = compiled(dense)
    said = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(f"READY {epoch}.", flush=True))
    model.fit(X, Y, batch_size=BATCH, epochs=10**6, verbose=0, callbacks=[said])


class Sticking(layers.Layer):
    """A layer in which rank 1 sticks at its third step, after it has told the others that it takes part."""

    steps = 0

    def call(self, inputs):
        outputs = tf.py_function(self.stick, [inputs], inputs.dtype)
        outputs.set_shape(inputs.shape)
        return outputs

    def stick(self, inputs):
        self.steps += 1
        if self.steps > 2 and rank == 1:
            threading.Event().wait()
        return inputs


def stuck():
    model = compiled(lambda: keras.Sequential([layers.Input((7,)), layers.Dense(2), Sticking()]))
    with pytest.raises((tfdist.CollectiveTimeoutError, tfdist.PeerLostError)) as caught:
        fit(model, X)
    print("RAISED", caught.value, flush=True)


run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
