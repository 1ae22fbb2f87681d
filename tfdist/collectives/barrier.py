"""Barrier by dissemination.

References:
    Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988.
"""

from __future__ import annotations

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


def barrier() -> Plan:
    """Waits for all ranks, in ⌈log₂ P⌉ steps of one byte.

    Returns:
        A plan for the engine. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        sent, received = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        reach = 1
        while reach < comm.size:
            target, source = (comm.rank + reach) % comm.size, (comm.rank - reach) % comm.size
            yield (comm.receive(received, source, tag), comm.send(sent, target, tag))
            reach *= 2

    return schedule
