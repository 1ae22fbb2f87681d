"""The all-reduce of the MPI library itself.

The library chooses how; its sum is the same on all ranks where the library keeps its promise to add in one order.
"""

from __future__ import annotations

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, into every one of them; see `tfdist.collectives.ring.all_reduce`."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        begin = getattr(comm, "library_all_reduce", None)
        if begin is None:
            raise ValueError(
                "the algorithm 'mpi' runs among all processes of a job over MPI, not in a group of them; "
                "choose another one for groups, such as 'ring'"
            )
        if source is not None:
            np.copyto(buffer, source)
        yield (begin(buffer, combine, tag),)

    return schedule
