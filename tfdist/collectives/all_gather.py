"""All-gather along a ring; lengths may be unequal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfdist.collectives import ring
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


def all_gather(parts: Sequence[np.ndarray]) -> Plan:
    """Copies every rank's part to all ranks.

    Args:
        parts: one one-dimensional contiguous array per rank, of any lengths, which are the same on all ranks. This
            rank's own is sent; the others are overwritten.

    Returns:
        A plan for the engine. Its result is None.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        yield from ring.all_gather_steps(comm, tag, parts)

    return schedule


def all_gather_rows(rows: np.ndarray) -> Plan:
    """Concatenates every rank's rows, in the order of the ranks, if the ranks do not know each other's counts.

    Args:
        rows: this rank's rows, contiguous; all dimensions but the first are the same on all ranks.

    Returns:
        A plan for the engine. Its result is a pair: the concatenation, an array of its own; and the number of rows of
        each rank, an int64 array.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        counts = np.zeros(comm.size, np.int64)
        counts[comm.rank] = len(rows)
        yield from all_gather([counts[rank : rank + 1] for rank in range(comm.size)])(comm, tag)
        shape = (int(counts.sum()), *rows.shape[1:])
        result = comm.take(math.prod(shape) * rows.dtype.itemsize).view(rows.dtype).reshape(shape)
        ends = np.cumsum(counts)
        blocks = [result[end - count : end] for end, count in zip(ends, counts, strict=True)]
        blocks[comm.rank][...] = rows
        yield from all_gather([block.reshape(-1) for block in blocks])(comm, tag)
        return result, counts

    return schedule
