"""The MPI library's own all-reduce.

The library chooses the algorithm. Its sum is the same on all ranks if the library adds in the same order on all ranks.
"""

from __future__ import annotations

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, on all ranks; see `tfdist.collectives.ring.all_reduce`."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        begin = getattr(comm, "library_all_reduce", None)
        if begin is None:
            raise ValueError(
                "the algorithm 'mpi' runs among all processes of a job over MPI, not in a group of them; "
                "choose another algorithm for groups, such as 'ring'"
            )
        if source is not None:
            np.copyto(buffer, source)
        yield (begin(buffer, combine, tag),)

    return schedule
