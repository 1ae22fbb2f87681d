"""A short training that does what the environment says at a chosen step of a chosen rank.

TEST_RANK, TEST_STEP: where. TEST_DO: kill, raise, exit, stop, interrupt, say (only prints READY).
"""

import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

RANK, STEP = int(os.environ.get("TEST_RANK", "1")), int(os.environ.get("TEST_STEP", "5"))
DO = os.environ.get("TEST_DO", "")
EPOCHS = int(os.environ.get("TEST_EPOCHS", "3"))

strategy = tfdist.AllReduceStrategy(algorithm=os.environ.get("TEST_ALGORITHM", "ring"))
print("ENTERED", strategy.rank, flush=True)
with strategy.scope():
    units = 4 + (strategy.rank if DO == "differ" else 0)
    model = keras.Sequential(
        [keras.layers.Input((32,)), keras.layers.Dense(units, name="first"), keras.layers.Dense(4)]
    )
    model.compile("sgd", "mse")


class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        if step != STEP:
            return
        if DO == "say":
            print("READY", flush=True)
        if strategy.rank != RANK:
            return
        if DO == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif DO == "raise":
            raise ValueError("boom")
        elif DO == "exit":
            sys.exit(3)
        elif DO == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif DO == "sleep":
            time.sleep(1000)


callbacks = [Act()]
if path := os.environ.get("TEST_CHECKPOINT"):
    callbacks.append(keras.callbacks.ModelCheckpoint(path))
try:
    data = tf.data.Dataset.from_tensor_slices((np.zeros((640, 32)), np.zeros((640, 4)))).batch(16)
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
except tfdist.TfdistError as error:
    print("ERROR", type(error).__name__, error, flush=True)
    raise
print("TRAINED", flush=True)
