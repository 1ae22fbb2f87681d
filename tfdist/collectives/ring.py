"""All-reduce along a ring: reduce-scatter, then all-gather.

Every rank sends 2(P-1)/P of the buffer, the least that is possible, in 2(P-1) steps; each passes on to its right
neighbour what it received from its left one. A chunk is summed by one rank and copied to the others, so the
result is the same to the last bit on all of them.

References:
    Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from __future__ import annotations

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule, partition
from tfdist.comm.communicator import Communicator

SEGMENT_BYTES = 1 << 20
"""Bytes on the way at once: small enough that what arrives is still in the cache when it is added."""


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add) -> Plan:
    """Replaces every rank's buffer by the combination of all of them.

    Args:
        buffer: one-dimensional and contiguous, of one length and dtype on all ranks; overwritten.
        combine: a commutative and associative NumPy ufunc of two arguments.

    Returns:
        A plan for the engine. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        chunks = [buffer[part] for part in partition(buffer.size, comm.size)]
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        segment = max(1, SEGMENT_BYTES // buffer.itemsize)
        landing = np.empty((2, min(segment, chunks[0].size)), buffer.dtype)
        for step in range(comm.size - 1):
            outgoing = chunks[(comm.rank - step) % comm.size]
            incoming = chunks[(comm.rank - step - 1) % comm.size]
            yield from _pass_on_and_add(comm, tag, right, left, outgoing, incoming, landing, combine)
        for step in range(comm.size - 1):
            outgoing = chunks[(comm.rank + 1 - step) % comm.size]
            incoming = chunks[(comm.rank - step) % comm.size]
            yield (comm.receive(incoming, left, tag), comm.send(outgoing, right, tag))

    return schedule


def _pass_on_and_add(
    comm: Communicator,
    tag: int,
    right: int,
    left: int,
    outgoing: np.ndarray,
    incoming: np.ndarray,
    landing: np.ndarray,
    combine: np.ufunc,
) -> Schedule:
    """One step of the reduce-scatter, in segments: one is added while the next is on its way."""
    length = landing.shape[1]
    if length == 0:
        return
    sends = [comm.send(outgoing[at : at + length], right, tag) for at in range(0, outgoing.size, length)]
    starts = range(0, incoming.size, length)
    receives = [
        comm.receive(landing[turn % 2, : incoming[at : at + length].size], left, tag)
        for turn, at in enumerate(starts[:2])
    ]
    for turn, at in enumerate(starts):
        target = incoming[at : at + length]
        yield (receives[turn],)
        combine(target, landing[turn % 2, : target.size], out=target)
        if turn + 2 < len(starts):
            following = incoming[starts[turn + 2] : starts[turn + 2] + length]
            receives.append(comm.receive(landing[turn % 2, : following.size], left, tag))
    yield sends
