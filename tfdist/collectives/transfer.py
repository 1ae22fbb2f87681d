"""One step of a collective: a vector to one rank, and one from another, in segments."""

from __future__ import annotations

from collections import deque

import numpy as np

from tfdist.collectives.schedule import Schedule
from tfdist.comm.communicator import Communicator, Request

IN_FLIGHT = 2
"""Segments of a step under way at once: one is used while the next is on its way."""

_NOTHING = np.zeros(0, np.uint8)


def exchange(
    comm: Communicator,
    tag: int,
    *,
    outgoing: np.ndarray = _NOTHING,
    destination: int = -1,
    target: np.ndarray = _NOTHING,
    source: int = -1,
    own: np.ndarray | None = None,
    combine: np.ufunc = np.add,
) -> Schedule:
    """Sends and receives at once.

    Args:
        comm: moves the bytes.
        tag: of the collective.
        outgoing: what is sent; nothing by default.
        destination: the rank that it goes to.
        target: receives what arrives; one-dimensional and of its size. Nothing by default.
        source: the rank that it comes from.
        own: what is combined with what arrives, into ``target``, which may be it; by default what arrives is kept.
        combine: a commutative and associative NumPy ufunc of two arguments.
    """
    length = max(1, comm.segment_bytes // max(outgoing.itemsize, target.itemsize))
    under_way: deque[list[Request]] = deque()
    for start in range(0, max(outgoing.size, target.size), length):
        segment = slice(start, start + length)
        transfers = []
        if start < target.size:
            if own is None:
                transfers.append(comm.receive(target[segment], source, tag))
            else:
                transfers.append(comm.receive_combined(own[segment], target[segment], combine, source, tag))
        if start < outgoing.size:
            transfers.append(comm.send(outgoing[segment], destination, tag))
        under_way.append(transfers)
        if len(under_way) == IN_FLIGHT:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()
