"""Reduce-scatter along a ring: each rank ends with the combination of one part of the buffer.

P-1 steps and γm(P-1)/P bytes per process: the first half of the ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.collectives import ring
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


def reduce_scatter(
    parts: Sequence[np.ndarray], combine: np.ufunc = np.add, inputs: Sequence[np.ndarray] | None = None
) -> Plan:
    """Combines the parts of all ranks, and leaves one combined part on each rank.

    Args:
        parts: one one-dimensional contiguous array per rank, of any lengths, the same on all ranks; overwritten.
        combine: a commutative and associative NumPy ufunc of two arguments.
        inputs: this rank's values, cut like ``parts``; only read. By default the contents of ``parts``.

    Returns:
        A plan for the engine. Its result is this rank's part, combined.
    """

    def schedule(comm: Communicator, tag: int) -> Schedule:
        # The ring leaves rank r with the part that it receives last; shifted by one, that is part r.
        yield from ring.reduce_scatter_steps(comm, tag, parts if inputs is None else inputs, parts, combine, shift=-1)
        return parts[comm.rank]

    return schedule
