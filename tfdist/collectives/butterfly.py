"""All-reduce by recursive doubling: in every step, exchange whole vectors with a partner twice as far away.

log₂ P steps and γm log₂ P bytes per process if P is a power of two: the fewest steps, for small vectors.

Every rank combines by itself, so all ranks must do it in the same way. Partners combine the lower ranks' vector with
the upper ranks', in this order: otherwise the minimum of 0.0 and -0.0, the sum of two NaN or the last bit of a complex
product could differ. And the result goes to separate memory, because NumPy uses other instructions if it overwrites an
operand.

References:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfdist.collectives.powers_of_two import CombineVectors, Core, folded, folded_whole
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, on all ranks; see `tfdist.collectives.ring.all_reduce`."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        given = buffer if source is None else source
        yield from folded(comm, tag, given, buffer, combine, _doubling(comm, tag, buffer, combine))

    return schedule


def all_reduce_whole(buffer: np.ndarray, combine: CombineVectors, source: np.ndarray | None = None) -> Plan:
    """Combines like `all_reduce`, for combinations that need to see whole vectors.

    Args:
        buffer: one-dimensional and contiguous; overwritten by the result.
        combine: combines two vectors into a third one.
        source: this rank's vector, like ``buffer``; only read. By default the contents of ``buffer``.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        given = buffer if source is None else source
        yield from folded_whole(comm, tag, given, buffer, combine, _doubling(comm, tag, buffer, combine))

    return schedule


def _doubling(comm: Communicator, tag: int, buffer: np.ndarray, combine: CombineVectors | np.ufunc) -> Core:
    def double(vector: np.ndarray, place: int, size: int, rank_of: Callable[[int], int]) -> Schedule:
        landing, spare = (comm.take(buffer.nbytes).view(buffer.dtype) for _ in range(2))
        distance = 1
        while distance < size:
            partner = rank_of(place ^ distance)
            yield from exchange(comm, tag, outgoing=vector, destination=partner, target=landing, source=partner)
            lower, upper = (landing, vector) if place & distance else (vector, landing)
            vector = combine(lower, upper, out=spare if vector is buffer else buffer)
            distance *= 2
        if vector is not buffer:
            np.copyto(buffer, vector)

    return double
