"""A rank that is killed in a phase of training, whose weights or optimizer are in parts, of which others need its own.

TEST_HOW says what is in parts, TEST_PHASE where the rank TEST_VICTIM is killed. The model runs eagerly, which needs no
tracing.
"""

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import sharding

FOLDER, PHASE, VICTIM = sys.argv[1], os.environ["TEST_PHASE"], int(os.environ["TEST_VICTIM"])
sharding.SPLIT_BYTES = 0

tfdist.init()
HOW = {
    "optimizer": {"shard": "optimizer"},
    "weights": {"shard": "weights"},
    "at once": {"shard": "weights", "gather": "model"},
    "mesh": {"mesh": tfdist.Mesh(model=tfdist.size())},
}[os.environ["TEST_HOW"]]
strategy = tfdist.AllReduceStrategy(devices=["CPU:0"], **HOW)
PIDS = tfdist.all_gather(tf.constant([os.getpid()])).numpy()
X = np.ones((8, 4))
PATH = os.path.join(FOLDER, "model.weights.h5")


def reach(phase, by=VICTIM):
    """Kills the victim in its phase.

    Args:
        phase: the phase that is reached.
        by: rank that kills it, as it alone reaches the phase.
    """
    if (phase, tfdist.rank()) == (PHASE, by):
        os.kill(PIDS[VICTIM], signal.SIGKILL)


@tf.custom_gradient
def passed(x):
    def back(gradient):
        reach("backward")
        return gradient

    return tf.identity(x), back


class Between(keras.layers.Layer):
    """Passes on what it gets, behind the first layer."""

    def call(self, x):
        if tf.executing_eagerly():
            reach("forward")
        return passed(x)

    def save_own_variables(self, store):
        reach("saving", by=0)  # the chief reads the others' parts

    def load_own_variables(self, store):
        reach("loading", by=0)


def initial(shape, dtype=None):
    reach("making")
    return tf.ones(shape, dtype)


def layer(units, **how):
    is_split = "mesh" in HOW
    return (tfdist.layers.ColumnParallelDense if is_split else keras.layers.Dense)(units, **how)


with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((4,)), layer(4), Between(), layer(4, kernel_initializer=initial), layer(2)]
    )
    model.compile("adam", "mse", run_eagerly=True)
model.fit(X, X[:, :2], batch_size=8, verbose=0)
model.save_weights(PATH)
model.load_weights(PATH)
tfdist.barrier()
print(f"the phase {PHASE} was not reached", flush=True)
