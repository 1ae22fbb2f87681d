"""Trains with BackupAndRestore; kills itself in the middle of a backup if TEST_KILL says before which renaming.

Started again, it goes on and compares its weights with those of a training that nothing has interrupted.
"""

import os
import signal
import sys

import keras
import numpy as np

import tfdist

strategy = tfdist.AllReduceStrategy()
x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
renamed = 0
original = os.replace


def replace(*arguments, **options):
    global renamed
    renamed += 1
    if str(renamed) == os.environ.get("TEST_KILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    original(*arguments, **options)


def trained(callbacks):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


os.replace = replace
epochs = []
noting = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
resumed = trained([keras.callbacks.BackupAndRestore(sys.argv[1]), noting])
print("EPOCHS", *epochs)
for ours, theirs in zip(resumed, trained([]), strict=True):
    np.testing.assert_array_equal(ours, theirs)
