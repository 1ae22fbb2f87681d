"""Ranks 0 and 1, and ranks 0 and 2, are groups that use the same keys; rank 1 is killed while rank 0 waits for it."""

import os
import signal
import time

import numpy as np
import tensorflow as tf

import tfdist

tfdist.init()
rank = tfdist.rank()
groups = [tfdist.Group(members) for members in ([0, 1], [2, 0]) if rank in members]
for _ in range(3):
    for group in groups:
        total = tfdist.all_reduce(tf.constant(float(rank)), "sum", group=group)
        assert float(total) == sum(group.ranks)
if rank != 2:
    tfdist.broadcast(tf.constant(1.0), 0, group=groups[0])  # rank 0 waits for nothing of rank 1's any more
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)


@tf.function
def summed(value):
    return tfdist.all_reduce(value, "sum", group=groups[0])


if rank == 0:
    engine = tfdist.runtime.world.current().engine
    if os.environ.get("TEST_UNNOTICED"):
        end = time.monotonic() + 60
        while 1 not in engine.lost:
            assert time.monotonic() < end, "the loss is not noticed"
            time.sleep(0.01)
    else:
        try:
            tfdist.all_reduce(tf.constant(1.0), group=groups[0])
        except tfdist.PeerLostError as error:
            print("LOST", error, flush=True)
        try:
            summed(tf.constant(1.0))
        except tf.errors.UnknownError as error:  # as an error of tfdist comes out of a graph of the user's
            print("IN A GRAPH", error, flush=True)
for number in range(100):
    total = tfdist.all_reduce(tf.constant(np.full(1000, float(number))), "sum", group=groups[-1])
    assert float(total[0]) == 2 * number
print("DONE", flush=True)
