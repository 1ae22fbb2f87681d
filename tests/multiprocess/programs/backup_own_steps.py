"""Trains a model with a `train_step` of its own and no `call`, with BackupAndRestore; TEST_KILL is a rank to kill.

Started again, it goes on, and compares its weights and optimizers with those of a training that nothing has
interrupted. Every rank has a folder of its own, as on two machines.
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

strategy = tfdist.AllReduceStrategy()
folder = Path(sys.argv[2]) / f"rank{strategy.rank}"
x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
y = x.sum(axis=1, keepdims=True)


class OwnStep(keras.Model):
    """Its optimizer is not built before training; the step does not train its scale."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(2, 1), initializer="glorot_uniform", name="kernel")
        self.scale = self.add_weight(shape=(1,), initializer="ones", name="scale")
        self.built = True

    def compile(self):
        super().compile(keras.optimizers.Adam(0.01))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.kernel * self.scale - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, [self.kernel.value]), [self.kernel])
        return {"loss": loss}


class GAN(keras.Model):
    """Has an optimizer for each network. Plain Keras restores them if they are built when the backup is read."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
        self.discriminator = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        self.built = True

    def compile(self):
        super().compile()
        self.g_optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        self.d_optimizer = keras.optimizers.Adam(0.01)
        self.g_optimizer.build(self.generator.trainable_variables)
        self.d_optimizer.build(self.discriminator.trainable_variables)

    def train_step(self, data):
        x, y = data
        logs = {}
        for name, network, optimizer, wanted in (
            ("d", self.discriminator, self.d_optimizer, 0.0),
            ("g", self.generator, self.g_optimizer, 1.0),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.discriminator(self.generator(x)) - wanted) ** 2)
                loss += tf.reduce_mean((self.discriminator(x) - y) ** 2)
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            logs[name] = loss
        return logs


class Kill(keras.callbacks.Callback):
    """Kills the rank in the middle of the third epoch; notes the epochs."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        if os.environ.get("TEST_KILL") == str(strategy.rank) and (self.epochs[-1], batch) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def trained(*callbacks):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = {"OwnStep": OwnStep, "GAN": GAN}[sys.argv[1]]()
        model.compile()
    model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    return [variable.numpy() for owner in (model, *optimizers) for variable in owner.variables]


kill = Kill()
resumed = trained(keras.callbacks.BackupAndRestore(folder / "backup"), kill)
print("EPOCHS", *kill.epochs)
flat = np.concatenate([np.ravel(value).astype("float64") for value in resumed])
everyone = strategy.gather(tf.constant(flat[np.newaxis]), axis=0).numpy()
np.testing.assert_array_equal(everyone, np.tile(flat, (strategy.size, 1)))
for ours, theirs in zip(resumed, trained(keras.callbacks.BackupAndRestore(folder / "other")), strict=True):
    np.testing.assert_array_equal(ours, theirs)
print("DONE")
