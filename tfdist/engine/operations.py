"""Collectives that a rank without data can take part in: one description yields what both kinds of rank do."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tfdist.cluster.messages import StandIn
from tfdist.collectives import algorithms, all_gather
from tfdist.collectives import barrier as barriers
from tfdist.collectives.schedule import Plan


@dataclass(frozen=True)
class Operation:
    """A collective.

    Attributes:
        plan: of a rank with data.
        stand_in: describes it to a rank without data; None if such a rank cannot take part.
    """

    plan: Plan
    stand_in: StandIn | None = None


def of(given: Plan | Operation) -> Operation:
    """A plan as an operation that needs the data of every rank; an operation as it is."""
    return given if isinstance(given, Operation) else Operation(given)


def all_reduce(
    buffer: np.ndarray,
    algorithm: str,
    combine: np.ufunc = np.add,
    source: np.ndarray | None = None,
) -> Operation:
    """An all-reduce. A rank without data can take part in a sum, to which it adds zeros.

    Args:
        buffer: the result, one-dimensional.
        algorithm: one of `tfdist.collectives.algorithms.ALGORITHMS`.
        combine: of two arguments.
        source: this rank's values, if they are not in the buffer.
    """
    stand_in = _sum_without_data(buffer.dtype, buffer.size, algorithm) if combine is np.add else None
    return Operation(algorithms.ALGORITHMS[algorithm](buffer, combine, source=source), stand_in)


@functools.lru_cache(1024)
def _sum_without_data(dtype: np.dtype, size: int, algorithm: str) -> StandIn:
    return StandIn("sum", dtype.name, (size,), algorithm)


def all_gather_rows(array: np.ndarray) -> Operation:
    """An all-gather along the first axis. A rank without data has no rows.

    Args:
        array: its first dimension may differ between ranks.
    """
    stand_in = StandIn("rows", array.dtype.name, array.shape[1:])
    return Operation(all_gather.all_gather_rows(np.ascontiguousarray(array)), stand_in)


def barrier() -> Operation:
    """A barrier. A rank without data takes part."""
    return Operation(barriers.barrier(), StandIn("barrier"))


def without_data(stand_in: StandIn) -> Plan:
    """The plan of a rank without data.

    Args:
        stand_in: of the operation.
    """
    if stand_in.what == "barrier":
        return barriers.barrier()
    import ml_dtypes  # noqa: F401  (registers its dtypes' names with NumPy)

    empty = np.zeros(stand_in.shape if stand_in.what == "sum" else (0, *stand_in.shape), np.dtype(stand_in.dtype))
    operation = all_reduce(empty, stand_in.algorithm) if stand_in.what == "sum" else all_gather_rows(empty)
    return operation.plan
