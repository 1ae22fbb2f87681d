"""Workers that train, a parameter server and an evaluator, in one job; see `tests/multiprocess/test_roles.py`.

The parameter server publishes an address and waits; the workers train until it has been lost and has come back.
"""

import json
import os
import sys
import threading

import numpy as np

import tfdist
from tfdist.cluster import discovery
from tfdist.cluster.control import Watcher
from tfdist.cluster.settings import Timeouts
from tfdist.runtime import job

DEADLINE = 60.0
ADDRESS = "address of ps 0"


class Events(Watcher):
    """Sets an event for each kind of event."""

    def __init__(self, task):
        self.task, self.is_over, self.is_lost, self.is_back = task, *(threading.Event() for _ in range(3))

    def came(self, task):
        if task == self.task and self.is_lost.is_set():
            self.is_back.set()

    def lost(self, task, error):
        if task == self.task:
            print("LOST", error, flush=True)
            self.is_lost.set()

    def over(self):
        self.is_over.set()


tfdist.init()
control = job.enter(discovery.discover(None), Timeouts.from_environment()).control
task = json.loads(os.environ["TF_CONFIG"])["task"]
watcher = Events(task=2)
control.watch(watcher)
print("ROLE", tfdist.role(), tfdist.rank(), tfdist.size(), flush=True)
if tfdist.rank() < 0:
    assert "mpi4py.MPI" not in sys.modules, "a task without a rank needs no MPI"
    try:
        tfdist.all_reduce(np.float32(1))
    except tfdist.ClusterSpecError as error:
        print("REFUSED", error, flush=True)
    if task["type"] == "evaluator" and "fail" in sys.argv:
        raise ValueError("no data to evaluate")
    if task["type"] == "ps":
        control.publish(ADDRESS, f"process {os.getpid()}")
        print("SERVING", flush=True)
    assert watcher.is_over.wait(3 * DEADLINE)
    print("OVER", flush=True)
    sys.exit()

import keras  # noqa: E402  (tasks without a rank need none, and start sooner)

first = control.look_up(ADDRESS)
strategy = tfdist.AllReduceStrategy()
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class UntilItIsBack(keras.callbacks.Callback):
    """Trains until the parameter server has come back on all ranks."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            print("TRAINING", flush=True)
        self.model.stop_training = bool(tfdist.all_reduce(np.float32(watcher.is_back.is_set()), "min"))


if "fail" in sys.argv:
    model.fit(x, x[:, :1], epochs=2, verbose=0)
else:
    model.fit(x, x[:, :1], epochs=10**6, verbose=0, callbacks=[UntilItIsBack()])
    second = control.look_up(ADDRESS)
    assert second != first, (first, second)
weights = tfdist.all_gather(model.get_weights()[0][None])
np.testing.assert_array_equal(weights[0], weights[1])
print("DONE", flush=True)
