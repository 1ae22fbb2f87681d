"""All-reduce by recursive doubling: in every step, exchange whole vectors with a partner twice as far away.

log₂ P steps and γm log₂ P bytes per process where P is a power of two: the fewest steps, for small vectors.

References:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfdist.collectives.powers_of_two import folded
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, into every one of them; see `tfdist.collectives.ring.all_reduce`."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        if source is not None:
            buffer[...] = source

        def double(place: int, size: int, rank_of: Callable[[int], int]) -> Schedule:
            landing = comm.take(buffer.nbytes).view(buffer.dtype)
            distance = 1
            while distance < size:
                partner = rank_of(place ^ distance)
                yield from exchange(comm, tag, outgoing=buffer, destination=partner, target=landing, source=partner)
                # Both partners add the same two vectors, and addition commutes to the last bit.
                combine(buffer, landing, out=buffer)
                distance *= 2

        yield from folded(comm, tag, buffer, combine, double)

    return schedule
