"""Collectives as generators that the engine resumes.

A schedule starts transfers on a `Communicator` and yields them. It is resumed when all of them have completed, and
returns (by ``StopIteration``) when the collective is done on this rank. It never waits, so the engine can run many at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from tfdist.comm.communicator import Communicator, Request

Schedule = Generator[Sequence[Request], None, Any]
"""Yields running transfers; returns the collective's result."""

Plan = Callable[[Communicator, int], Schedule]
"""Starts a collective on a communicator, with its own tag."""


def partition(length: int, parts: int) -> list[slice]:
    """Cuts ``length`` elements into contiguous parts whose sizes differ by at most one."""
    base, extra = divmod(length, parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [slice(bounds[part], bounds[part + 1]) for part in range(parts)]


def flat(array: np.ndarray) -> np.ndarray:
    """Returns the array's elements as one dimension, without a copy.

    Raises:
        ValueError: the array is not contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"a buffer must be contiguous; got a non-contiguous array of shape {array.shape}")
    return array.reshape(-1)
