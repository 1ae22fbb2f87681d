"""The all-reduce algorithms by the names that users choose them by."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tfdist.collectives import butterfly, hierarchical, library, naive, reduce_scatter_gather, ring, tree
from tfdist.collectives.cost import TYPICAL, Calibration, cheapest
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator


class AllReduce(Protocol):
    """An all-reduce; see `tfdist.collectives.ring.all_reduce`."""

    def __call__(self, buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
        """Plans to combine the buffers of all ranks, into every one of them."""
        ...


ALGORITHMS: dict[str, AllReduce] = {
    "ring": ring.all_reduce,
    "naive": naive.all_reduce,
    "tree": tree.all_reduce,
    "butterfly": butterfly.all_reduce,
    "reduce_scatter_gather": reduce_scatter_gather.all_reduce,
    "hierarchical": hierarchical.all_reduce,
    "mpi": library.all_reduce,
}

AUTO = "auto"
"""The name of the choice among them by the cost model, for every vector by its size."""


def named(name: str, calibration: Calibration | None = None) -> AllReduce:
    """The algorithm of that name.

    Args:
        name: of an algorithm, or ``"auto"``.
        calibration: by which ``"auto"`` chooses, the same on all ranks; typical figures by default.

    Raises:
        ValueError: there is none.
    """
    if name == AUTO:
        return _choosing(calibration or TYPICAL)
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)} or {AUTO}; got {name!r}")
    return ALGORITHMS[name]


def _choosing(calibration: Calibration) -> AllReduce:
    def all_reduce(buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
        def schedule(comm: Communicator, tag: int) -> Schedule:
            chosen = ALGORITHMS[cheapest(comm.hosts, buffer.nbytes, calibration)]
            yield from chosen(buffer, combine, source)(comm, tag)

        return schedule

    return all_reduce
