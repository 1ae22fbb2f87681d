"""Point-to-point transfers; the shape is sent before the elements."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule, flat
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator

SOURCE, DESTINATION = 0, 1
"""The ranks of the sender and the receiver in their communicator."""


def send(array: np.ndarray) -> Plan:
    """Sends an array.

    Args:
        array: contiguous; must not change until the plan is done.

    Returns:
        A plan for the engine, on the source. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        shape = np.array(array.shape, np.int64)
        # The elements do not wait until the shape has left: the sender may compute for long before it checks that.
        started = [comm.send(shape, DESTINATION, tag)] if array.ndim else []
        for requests in exchange(comm, tag, outgoing=flat(array).view(np.uint8), destination=DESTINATION):
            yield [*started, *requests]
            started = []
        if started:
            yield started

    return schedule


def receive(dimensions: int, dtype: np.dtype, take: Callable[[int], np.ndarray]) -> Plan:
    """Receives an array.

    Args:
        dimensions: the array's number of dimensions.
        dtype: the array's dtype.
        take: allocates an array of a number of bytes.

    Returns:
        A plan for the engine, on the destination. Its result is the array.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        shape = np.zeros(dimensions, np.int64)
        yield from exchange(comm, tag, target=shape, source=SOURCE)
        memory = take(math.prod(shape.tolist()) * dtype.itemsize)
        yield from exchange(comm, tag, target=memory, source=SOURCE)
        return memory.view(dtype).reshape(shape.tolist())

    return schedule
