"""All-reduce by gathering all vectors on every rank.

P-1 steps and γm(P-1) bytes per process, and memory for P vectors: for comparison, and for very few processes. Each
rank adds in the order of the ranks, so the result is bitwise equal on all of them.
"""

from __future__ import annotations

import numpy as np

from tfdist.collectives.all_gather import all_gather
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, on all ranks; see `tfdist.collectives.ring.all_reduce`."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        vectors = [comm.take(buffer.nbytes).view(buffer.dtype) for _ in range(comm.size)]
        vectors[comm.rank][...] = buffer if source is None else source
        yield from all_gather(vectors)(comm, tag)
        buffer[...] = vectors[0]
        for vector in vectors[1:]:
            combine(buffer, vector, out=buffer)

    return schedule
