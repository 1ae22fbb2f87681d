"""One step of a collective: sends a vector to one rank and receives one from another, in segments."""

from __future__ import annotations

from collections import deque

import numpy as np

from tfdist.collectives.schedule import Schedule
from tfdist.comm.communicator import Combine, Communicator, Request

IN_FLIGHT = 2
"""Segments of a step in flight at once: one is used while the next is being transferred."""

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
    combine: Combine = np.add,
) -> Schedule:
    """Sends and receives at the same time.

    Args:
        comm: the communicator.
        tag: the collective's tag.
        outgoing: the vector to send; nothing by default.
        destination: the rank to send to.
        target: receives the incoming vector; one-dimensional and of its size. Nothing by default.
        source: the rank to receive from.
        own: combined with the incoming vector into ``target``, and may be ``target`` itself; by default the incoming
            vector is stored as it is.
        combine: combines ``own`` with the incoming vector; commutative and associative.
    """
    length = max(1, comm.segment_bytes // max(outgoing.itemsize, target.itemsize))
    in_flight: deque[list[Request]] = deque()
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
        in_flight.append(transfers)
        if len(in_flight) == IN_FLIGHT:
            yield in_flight.popleft()
    while in_flight:
        yield in_flight.popleft()
