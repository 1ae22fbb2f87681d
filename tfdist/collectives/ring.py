"""All-reduce along a ring: reduce-scatter, then all-gather.

Every rank sends 2(P-1)/P of the buffer, the least possible, in 2(P-1) steps; each passes on to its right neighbour
what it received from its left one. Each chunk's final sum is computed on one rank and copied to the others, so the
result is bitwise equal on all of them.

References:
    Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule, partition
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Combine, Communicator

_CACHED_ELEMENTS = 1 << 16
"""Elements that are combined and then finished while they are in the cache."""


class Finish(Protocol):
    """Changes the combined values of a chunk on the rank that has them first, before the others get them."""

    def finish(self, part: np.ndarray) -> None:
        """Changes a part of the chunk in place: the result of one call of the function that combines."""
        ...

    def end(self, chunk: np.ndarray) -> None:
        """Is called once all parts are finished; may change the chunk."""
        ...


def all_reduce(
    buffer: np.ndarray,
    combine: Combine = np.add,
    source: np.ndarray | None = None,
    finish: Finish | None = None,
) -> Plan:
    """Combines the buffers of all ranks; every rank gets the result.

    Args:
        buffer: one-dimensional and contiguous, of one length and dtype on all ranks; overwritten by the result.
        combine: a commutative and associative function, called as a NumPy ufunc of two arguments with ``out``.
        source: this rank's vector, like ``buffer``; only read. By default the contents of ``buffer``.
        finish: changes the result, each chunk on one rank, which takes a P-th of the time of changing it on all; by
            default the result stays as it is.

    Returns:
        A plan for the engine. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        given = buffer if source is None else source
        if comm.size == 1:
            np.copyto(buffer, given)
        parts = partition(buffer.size, comm.size)
        chunks, inputs = [buffer[part] for part in parts], [given[part] for part in parts]
        yield from reduce_scatter_steps(comm, tag, inputs, chunks, combine, finish=finish)
        if finish is not None:
            if comm.size == 1:
                finish.finish(buffer)
            finish.end(chunks[(comm.rank + 1) % comm.size])
        yield from all_gather_steps(comm, tag, chunks, shift=1)

    return schedule


def reduce_scatter_steps(
    comm: Communicator,
    tag: int,
    inputs: Sequence[np.ndarray],
    chunks: Sequence[np.ndarray],
    combine: Combine,
    shift: int = 0,
    finish: Finish | None = None,
) -> Schedule:
    """Runs the first half of the ring, which leaves rank r with the combination of chunk r + 1 + ``shift``.

    Args:
        comm: the communicator.
        tag: the collective's tag.
        inputs: this rank's vector, cut into a chunk per rank; only read.
        chunks: receive the combinations, cut in the same way; may be ``inputs``.
        combine: a commutative and associative function, called as a NumPy ufunc of two arguments with ``out``.
        shift: selects the chunk that is left on each rank.
        finish: changes the combination that is left.
    """
    for step in range(comm.size - 1):
        if finish is not None and step == comm.size - 2:
            combine = _finished(combine, finish)
        outgoing = (chunks if step else inputs)[(comm.rank + shift - step) % comm.size]
        place = (comm.rank + shift - step - 1) % comm.size
        yield from _pass_on(comm, tag, outgoing, chunks[place], inputs[place], combine)


def _finished(combine: Combine, finish: Finish) -> Combine:
    """Returns a function that combines two vectors into a third, and finishes what it has combined."""

    def combine_and_finish(own: np.ndarray, incoming: np.ndarray, out: np.ndarray) -> None:
        for start in range(0, own.size, _CACHED_ELEMENTS):
            part = slice(start, start + _CACHED_ELEMENTS)
            combine(own[part], incoming[part], out=out[part])
            finish.finish(out[part])

    return combine_and_finish


def all_gather_steps(comm: Communicator, tag: int, chunks: Sequence[np.ndarray], shift: int = 0) -> Schedule:
    """Runs the second half of the ring, which copies every rank's chunk to all ranks.

    Args:
        comm: the communicator.
        tag: the collective's tag.
        chunks: one chunk per rank, of any lengths, which are the same on all ranks.
        shift: offset of each rank's own chunk: rank r begins with chunk r + ``shift``.
    """
    for step in range(comm.size - 1):
        outgoing = chunks[(comm.rank + shift - step) % comm.size]
        yield from _pass_on(comm, tag, outgoing, chunks[(comm.rank + shift - step - 1) % comm.size])


def _pass_on(
    comm: Communicator,
    tag: int,
    outgoing: np.ndarray,
    target: np.ndarray,
    own: np.ndarray | None = None,
    combine: Combine = np.add,
) -> Schedule:
    """Sends to the right neighbour and receives from the left one; combines with ``own`` if given."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return exchange(
        comm, tag, outgoing=outgoing, destination=right, target=target, source=left, own=own, combine=combine
    )
