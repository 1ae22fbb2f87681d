"""All-reduce by passing every whole vector on to everyone.

P-1 steps and γm(P-1) bytes per process, and room for P-1 vectors: for comparison, and for very few processes. Each
rank adds in the order of the ranks, so the result is the same to the last bit on all of them.
"""

from __future__ import annotations

import numpy as np

from tfdist.collectives.all_gather import all_gather
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, into every one of them; see `tfdist.collectives.ring.all_reduce`."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        vectors = [comm.take(buffer.nbytes).view(buffer.dtype) for _ in range(comm.size)]
        vectors[comm.rank][...] = buffer if source is None else source
        yield from all_gather(vectors)(comm, tag)
        buffer[...] = vectors[0]
        for vector in vectors[1:]:
            combine(buffer, vector, out=buffer)

    return schedule
