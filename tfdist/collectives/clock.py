"""How far the ranks' clocks are apart, measured by messages to and from rank 0.

References:
    Cristian, Probabilistic clock synchronization, 1989: of many round trips the shortest tells most.
"""

from __future__ import annotations

import time

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator

ROUNDS = 20


def clock_offset() -> Plan:
    """Finds what this rank must add to `time.monotonic` for rank 0's.

    Returns:
        A plan for the engine. Its result is in seconds; wrong by less than half of the shortest round trip.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        told, heard = np.zeros(1), np.zeros(1)
        if comm.rank:
            for _ in range(ROUNDS):
                yield (comm.receive(heard, 0, tag),)
                told[0] = time.monotonic()
                yield (comm.send(told, 0, tag),)
            yield (comm.receive(heard, 0, tag),)
            return float(heard[0])
        for rank in range(1, comm.size):
            shortest, offset = float("inf"), 0.0
            for _ in range(ROUNDS):
                begin = time.monotonic()
                yield (comm.send(told, rank, tag), comm.receive(heard, rank, tag))
                end = time.monotonic()
                if end - begin < shortest:
                    shortest, offset = end - begin, (begin + end) / 2 - float(heard[0])
            told[0] = offset
            yield (comm.send(told, rank, tag),)
        return 0.0

    return schedule
