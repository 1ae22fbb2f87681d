"""All-reduce by a binomial tree: reduce to rank 0, then broadcast.

2⌈log₂ P⌉ steps, and γm⌈log₂ P⌉ bytes sent by the root, γm or more by the others: few messages, for small vectors.

References:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

import numpy as np

from tfdist.collectives.broadcast import broadcast
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, on all ranks; see `tfdist.collectives.ring.all_reduce`."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        if source is not None:
            buffer[...] = source
        yield from reduce(buffer, combine)(comm, tag)
        yield from broadcast(buffer)(comm, tag)

    return schedule


def reduce(buffer: np.ndarray, combine: np.ufunc = np.add) -> Plan:
    """Combines the buffers of all ranks into rank 0's, in ⌈log₂ P⌉ steps; the others are left partly combined."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        reach = 1
        while reach < comm.size:
            if comm.rank & reach:
                yield from exchange(comm, tag, outgoing=buffer, destination=comm.rank - reach)
                return
            if comm.rank + reach < comm.size:
                child = comm.rank + reach
                yield from exchange(comm, tag, target=buffer, source=child, own=buffer, combine=combine)
            reach *= 2

    return schedule
