"""Offsets between the ranks' clocks, measured by messages between machines; processes of one machine share a clock.

References:
    Cristian, Probabilistic clock synchronization, 1989: the shortest of many round trips is the most accurate.
"""

from __future__ import annotations

import time

import numpy as np

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator

ROUNDS = 20


def clock_offset() -> Plan:
    """Measures the offset to add to this rank's `time.monotonic` to get rank 0's.

    Returns:
        A plan for the engine. Its result is in seconds: 0 on the machine of rank 0, otherwise with an error below half
        of the shortest round trip.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        sent, received = np.zeros(1), np.zeros(1)
        if comm.rank and comm.hosts[comm.rank] == comm.hosts[0]:
            return 0.0
        if comm.rank:
            for _ in range(ROUNDS):
                yield (comm.receive(received, 0, tag),)
                sent[0] = time.monotonic()
                yield (comm.send(sent, 0, tag),)
            yield (comm.receive(received, 0, tag),)
            return float(received[0])
        for rank in [rank for rank, host in enumerate(comm.hosts) if host != comm.hosts[0]]:
            shortest, offset = float("inf"), 0.0
            for _ in range(ROUNDS):
                begin = time.monotonic()
                yield (comm.send(sent, rank, tag), comm.receive(received, rank, tag))
                end = time.monotonic()
                if end - begin < shortest:
                    shortest, offset = end - begin, (begin + end) / 2 - float(received[0])
            sent[0] = offset
            yield (comm.send(sent, rank, tag),)
        return 0.0

    return schedule
