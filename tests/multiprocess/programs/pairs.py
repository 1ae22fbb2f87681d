"""Two pairs of processes, each with a strategy of its own, train different models at the same time.

Beside them every process trains its pair's model once more by itself, in a group of one: what a pair should come to.
Names of models, sites and keys are the same in all groups on purpose.
"""

import os
import signal
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

keras.config.set_floatx("float64")
tfdist.init()
rank = tfdist.rank()
members = [0, 1] if rank < 2 else [3, 2]  # the second pair in an order of its own
pair, alone = tfdist.Group(members), tfdist.Group([rank])
first = rank < 2
units, momentum, epochs = (5, 0.9, 3) if first else (9, 0.0, 7)

x = np.random.default_rng(members[0]).normal(size=(50, 6))
y = x.sum(axis=1, keepdims=True)
samples = tf.data.Dataset.from_tensor_slices((x, y))


def trained(group):
    """A model that starts alike in every group of these processes, its weights then, and its history."""
    keras.utils.set_random_seed(3)
    strategy = tfdist.AllReduceStrategy(group=group)
    assert (strategy.rank, strategy.size) == (group.rank, group.size)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum), "mse", run_eagerly=group is alone)
    history = model.fit(samples.batch(16), epochs=epochs, validation_data=samples.take(11).batch(16), verbose=0)
    return strategy, model, model.get_weights(), history.history


strategy, model, weights, history = trained(pair)
*_, expected, alone_history = trained(alone)
for weight, other in zip(weights, expected, strict=True):
    np.testing.assert_allclose(weight, other, rtol=0, atol=1e-9)
for name, values in alone_history.items():
    np.testing.assert_allclose(history[name], values, rtol=1e-9)
everyone = tfdist.all_gather(tf.constant([weights[0].ravel()[:4]]), group=pair)
np.testing.assert_array_equal(everyone[0], everyone[1])
reports = tfdist.callbacks.Communication()
model.fit(samples.batch(16), epochs=2, verbose=0, callbacks=[reports])
assert len(reports.history["mib_sent"]) == 2
total = tfdist.all_reduce(tf.constant(1.0), "sum")  # over all four
assert float(total) == 4
print("WRITES", strategy.extended.should_checkpoint, flush=True)


# Rank 1 is killed in an endless training of the first pair; the second goes on when it knows.
class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)


if first:
    try:
        model.fit(samples.repeat().batch(16), steps_per_epoch=10**6, verbose=0, callbacks=[Die()])
    except tfdist.PeerLostError as error:
        print("LOST", error, flush=True)
        raise
end = time.monotonic() + 60
while {0, 1} - strategy.extended.group.engine.lost.keys():  # 1 is killed; 0 fails for it
    assert time.monotonic() < end, "the loss is not noticed"
    time.sleep(0.01)
*_, after, _ = trained(pair)
for weight, other in zip(after, expected, strict=True):
    np.testing.assert_allclose(weight, other, rtol=0, atol=1e-9)
try:
    tfdist.all_reduce(tf.constant(1.0))
except tfdist.PeerLostError as error:
    print("OF ALL", error, flush=True)
print("SURVIVED", flush=True)
