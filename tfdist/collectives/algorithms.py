"""The all-reduce algorithms by the names that users choose them by."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tfdist.collectives import butterfly, naive, reduce_scatter_gather, ring, tree
from tfdist.collectives.schedule import Plan


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
}


def named(name: str) -> AllReduce:
    """The algorithm of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {name!r}")
    return ALGORITHMS[name]
