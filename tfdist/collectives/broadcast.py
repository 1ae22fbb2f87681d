"""Broadcast down a binomial tree."""

from __future__ import annotations

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


def broadcast(buffer: np.ndarray, root: int = 0) -> Plan:
    """Replaces every rank's buffer by the root's, in ⌈log₂ P⌉ steps.

    Args:
        buffer: one-dimensional and contiguous, of one length and dtype on all ranks; overwritten on all but the
            root.
        root: the rank whose buffer counts.

    Returns:
        A plan for the engine. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        place = (comm.rank - root) % comm.size
        reach = 1
        while reach < comm.size:
            if place < reach:
                if place + reach < comm.size:
                    yield (comm.send(buffer, (comm.rank + reach) % comm.size, tag),)
            elif place < 2 * reach:
                yield (comm.receive(buffer, (comm.rank - reach) % comm.size, tag),)
            reach *= 2

    return schedule
