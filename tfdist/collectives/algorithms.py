"""The all-reduce algorithms by name."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tfdist.collectives import butterfly, hierarchical, library, naive, reduce_scatter_gather, ring, tree
from tfdist.collectives.cost import TYPICAL, Calibration, cheapest
from tfdist.collectives.schedule import Plan


class AllReduce(Protocol):
    """An all-reduce; see `tfdist.collectives.ring.all_reduce`."""

    def __call__(self, buffer: np.ndarray, combine: np.ufunc = np.add, source: np.ndarray | None = None) -> Plan:
        """Plans to combine the buffers of all ranks; every rank gets the result."""
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

FINISHING = ("ring",)
"""Those that can change the result on its way, each part on one rank; see `tfdist.collectives.ring.Finish`."""

AUTO = "auto"
"""The name for a choice by the cost model, which selects an algorithm for every vector by its size."""


def check(name: str, group: bool = False, more: tuple[str, ...] = ()) -> None:
    """Checks the name of an algorithm.

    Args:
        name: an algorithm's name, or ``"auto"``.
        group: whether it will run in a group of only some of the processes.
        more: further names that the caller knows.

    Raises:
        ValueError: there is no such algorithm, or it cannot run in a group.
    """
    if name not in (*ALGORITHMS, *more, AUTO):
        raise ValueError(f"algorithm must be one of {', '.join((*ALGORITHMS, *more))} or {AUTO}; got {name!r}")
    if group and name == "mpi":
        raise ValueError(
            "the algorithm 'mpi' runs among all processes of a job, not in a group of them; choose another algorithm, "
            "such as 'auto'"
        )


def choose(name: str, hosts: tuple[int, ...], nbytes: int, calibration: Calibration | None = None) -> str:
    """Returns the name of an algorithm; replaces ``"auto"`` by the cheapest one.

    Args:
        name: an algorithm's name, or ``"auto"``.
        hosts: by rank, the number of its machine.
        nbytes: the vector's size in bytes.
        calibration: the figures for ``"auto"``, the same on all ranks; typical figures by default.
    """
    return cheapest(hosts, nbytes, calibration or TYPICAL) if name == AUTO else name
