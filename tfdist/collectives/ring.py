"""All-reduce along a ring: reduce-scatter, then all-gather.

Every rank sends 2(P-1)/P of the buffer, the least that is possible, in 2(P-1) steps; each passes on to its right
neighbour what it received from its left one. A chunk is summed by one rank and copied to the others, so the
result is the same to the last bit on all of them.

References:
    Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule, partition
from tfdist.comm.buffers import BufferPool
from tfdist.comm.communicator import Communicator, Request

SEGMENT_BYTES = 4 << 20
"""Bytes on the way at once: few enough that what arrives is still in the cache when it is added, and enough that
processes which share cores need not take turns too often."""

_scratch = BufferPool()


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, into every one of them.

    Args:
        buffer: one-dimensional and contiguous, of one length and dtype on all ranks; overwritten by the result.
        combine: a commutative and associative NumPy ufunc of two arguments.
        source: what this rank gives, like ``buffer``, and only read; by default what the buffer holds.

    Returns:
        A plan for the engine. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        given = buffer if source is None else source
        parts = partition(buffer.size, comm.size)
        chunks, own = [buffer[part] for part in parts], [given[part] for part in parts]
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        yield from reduce_scatter_steps(comm, tag, own, chunks, combine)
        for step in range(comm.size - 1):
            outgoing = chunks[(comm.rank + 1 - step) % comm.size]
            incoming = chunks[(comm.rank - step) % comm.size]
            yield (comm.receive(incoming, left, tag), comm.send(outgoing, right, tag))

    return schedule


def reduce_scatter_steps(
    comm: Communicator,
    tag: int,
    own: Sequence[np.ndarray],
    chunks: Sequence[np.ndarray],
    combine: np.ufunc,
    shift: int = 0,
) -> Schedule:
    """The first half of the ring: leaves rank r with the combination of chunk r + 1 + ``shift``.

    Args:
        comm: moves the bytes.
        tag: of the collective.
        own: what this rank gives, cut into a chunk per rank; only read.
        chunks: where the combinations come to lie, cut in the same way; may be ``own``.
        combine: a commutative and associative NumPy ufunc of two arguments.
        shift: which chunk is left.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    segment = max(1, SEGMENT_BYTES // chunks[0].itemsize)
    length = min(segment, chunks[0].size)
    landing = _scratch.take(2 * length * chunks[0].itemsize).view(chunks[0].dtype).reshape(2, length)
    for step in range(comm.size - 1):
        outgoing = (chunks if step else own)[(comm.rank + shift - step) % comm.size]
        place = (comm.rank + shift - step - 1) % comm.size
        yield from _pass_on_and_add(comm, tag, right, left, outgoing, own[place], chunks[place], landing, combine)


def _pass_on_and_add(
    comm: Communicator,
    tag: int,
    right: int,
    left: int,
    outgoing: np.ndarray,
    own: np.ndarray,
    target: np.ndarray,
    landing: np.ndarray,
    combine: np.ufunc,
) -> Schedule:
    """One step of the reduce-scatter, in segments: one is added while the next is on its way."""
    length = landing.shape[1]
    if length == 0:
        return
    sends = [comm.send(outgoing[at : at + length], right, tag) for at in range(0, outgoing.size, length)]
    segments = [slice(at, min(at + length, target.size)) for at in range(0, target.size, length)]

    def receive(turn: int) -> Request:
        segment = segments[turn]
        return comm.receive(landing[turn % 2, : segment.stop - segment.start], left, tag)

    receives = [receive(turn) for turn in range(len(segments[:2]))]
    for turn, segment in enumerate(segments):
        yield (receives[turn],)
        arrived = landing[turn % 2, : segment.stop - segment.start]
        combine(own[segment], arrived, out=target[segment])
        if turn + 2 < len(segments):
            receives.append(receive(turn + 2))
    yield sends
