"""All-reduce on two levels: inside each machine, where processes read each other's memory, and between machines.

Inside a machine with L processes the vector is reduce-scattered into L parts; the i-th processes of all H machines
all-reduce the i-th part along a ring; then each machine gathers. Between machines every process sends
2γm(H-1)/(HL) bytes, and inside 2γm(L-1)/L: the slow link carries 2(H-1)/H of the vector per machine instead of the
flat ring's 2(P-1)/P, in 2(H-1) steps instead of 2(P-1). If machines have different numbers of processes, the number of
parts is that of the smallest.

References:
    Jia et al., Highly scalable deep learning training system with mixed-precision, 2018 (hierarchical all-reduce).
"""

from __future__ import annotations

import numpy as np

from tfdist.collectives import ring
from tfdist.collectives.schedule import Plan, Schedule, partition
from tfdist.comm.communicator import Communicator
from tfdist.comm.group import GroupCommunicator


def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, on all ranks; see `tfdist.collectives.ring.all_reduce`."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        machines = by_machine(comm.hosts)
        local_ranks = next(ranks for ranks in machines if comm.rank in ranks)
        inside, lane = GroupCommunicator(comm, local_ranks), local_ranks.index(comm.rank)
        lanes = min(map(len, machines))
        parts = partition(buffer.size, lanes) + [slice(0, 0)] * (len(local_ranks) - lanes)
        given = buffer if source is None else source
        if inside.size == 1 and source is not None:
            np.copyto(buffer, source)
        chunks = [buffer[part] for part in parts]
        yield from ring.reduce_scatter_steps(inside, tag, [given[part] for part in parts], chunks, combine, shift=-1)
        if lane < lanes:
            across = GroupCommunicator(comm, [ranks[lane] for ranks in machines])
            yield from ring.all_reduce(chunks[lane], combine)(across, tag)
        yield from ring.all_gather_steps(inside, tag, chunks)

    return schedule


def by_machine(hosts: tuple[int, ...]) -> list[list[int]]:
    """Returns the ranks of each machine.

    Args:
        hosts: by rank, the number of its machine.
    """
    return [[rank for rank, host in enumerate(hosts) if host == machine] for machine in sorted(set(hosts))]
