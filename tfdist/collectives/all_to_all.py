"""All-to-all: every rank sends an array to every other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator


def all_to_all(given: Sequence[np.ndarray], taken: Sequence[np.ndarray]) -> Plan:
    """Sends ``given[k]`` to rank k and receives ``taken[k]`` from it, in P-1 pairwise exchanges.

    Args:
        given: one contiguous one-dimensional array per rank; only read.
        taken: one array per rank, of the sizes that the others send; overwritten.

    Returns:
        A plan for the engine. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        taken[comm.rank][...] = given[comm.rank]
        for step in range(1, comm.size):
            target, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            yield from exchange(
                comm, tag, outgoing=given[target], destination=target, target=taken[source], source=source
            )

    return schedule
