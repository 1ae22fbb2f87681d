"""Collectives that ranks without data can take part in."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tfdist.cluster.messages import StandIn
from tfdist.collectives import algorithms, all_gather, ring
from tfdist.collectives import barrier as barriers
from tfdist.collectives.schedule import Plan
from tfdist.engine.means import Division


@dataclass(frozen=True)
class Operation:
    """A collective, as plan and as description for ranks without data.

    Attributes:
        plan: the plan of a rank with data.
        stand_in: description for a rank without data; None if such a rank cannot take part.
    """

    plan: Plan
    stand_in: StandIn | None = None


def as_operation(given: Plan | Operation) -> Operation:
    """Returns an operation unchanged, and a plan as an operation that needs the data of every rank."""
    return given if isinstance(given, Operation) else Operation(given)


def all_reduce(
    buffer: np.ndarray,
    algorithm: str,
    combine: np.ufunc = np.add,
    source: np.ndarray | None = None,
    division: Division | None = None,
) -> Operation:
    """Returns an all-reduce. A rank without data can take part in a sum, to which it adds zeros.

    Args:
        buffer: one-dimensional array for the result.
        algorithm: name of an algorithm in `tfdist.collectives.algorithms.ALGORITHMS`.
        combine: ufunc of two arguments that combines values.
        source: this rank's values, if they are not in the buffer.
        division: divides the sum on its way, and adds in place of ``combine``; for algorithms in
            `tfdist.collectives.algorithms.FINISHING`.
    """
    divisor = 0 if division is None else division.divisor
    stand_in = _sum_without_data(buffer.dtype, buffer.size, algorithm, divisor) if combine is np.add else None
    if division is not None:
        return Operation(ring.all_reduce(buffer, division.add, source, division), stand_in)
    return Operation(algorithms.ALGORITHMS[algorithm](buffer, combine, source=source), stand_in)


@functools.lru_cache(1024)
def _sum_without_data(dtype: np.dtype, size: int, algorithm: str, divisor: int) -> StandIn:
    return StandIn("sum", dtype.name, (size,), algorithm, divisor)


def all_gather_rows(array: np.ndarray) -> Operation:
    """Returns an all-gather along the first axis. A rank without data has no rows.

    Args:
        array: this rank's rows; their number may differ between ranks.
    """
    stand_in = StandIn("rows", array.dtype.name, array.shape[1:])
    return Operation(all_gather.all_gather_rows(np.ascontiguousarray(array)), stand_in)


def barrier() -> Operation:
    """Returns a barrier. A rank without data takes part."""
    return Operation(barriers.barrier(), StandIn("barrier"))


def without_data(stand_in: StandIn) -> Plan:
    """Returns the plan of a rank without data.

    Args:
        stand_in: description of the collective.
    """
    if stand_in.what == "barrier":
        return barriers.barrier()
    import ml_dtypes  # noqa: F401  (registers its dtypes' names with NumPy)

    dtype = np.dtype(stand_in.dtype)
    if stand_in.what == "rows":
        return all_gather_rows(np.zeros((0, *stand_in.shape), dtype)).plan
    division = Division(stand_in.divisor, dtype) if stand_in.divisor else None
    return all_reduce(np.zeros(stand_in.shape, dtype), stand_in.algorithm, division=division).plan
