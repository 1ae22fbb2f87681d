"""Broadcast down a binomial tree."""

from __future__ import annotations

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator


def broadcast(buffer: np.ndarray, root: int = 0) -> Plan:
    """Replaces every rank's buffer by the root's, in ⌈log₂ P⌉ steps.

    Args:
        buffer: one-dimensional and contiguous, of one length and dtype on all ranks; overwritten on all but the
            root.
        root: the rank whose buffer is sent.

    Returns:
        A plan for the engine. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        place = (comm.rank - root) % comm.size
        reach = 1
        while reach < comm.size:
            if place < reach:
                if place + reach < comm.size:
                    child = (comm.rank + reach) % comm.size
                    yield from exchange(comm, tag, outgoing=buffer, destination=child)
            elif place < 2 * reach:
                yield from exchange(comm, tag, target=buffer, source=(comm.rank - reach) % comm.size)
            reach *= 2

    return schedule
