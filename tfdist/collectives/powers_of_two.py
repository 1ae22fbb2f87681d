"""Runs algorithms that need a power of two on any number of processes.

With P = 2^k + r processes, the first 2r fold into r: each even rank sends its vector to its odd neighbour, takes no
part, and gets the result back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from tfdist.collectives.schedule import Schedule
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator

Core = Callable[[np.ndarray, int, int, Callable[[int], int]], Schedule]
"""The algorithm among 2^k processes, which leaves its result in the buffer. Called with this rank's vector, its place
among them, 2^k, and a function that maps a place to a rank."""


def folded(
    comm: Communicator, tag: int, given: np.ndarray, buffer: np.ndarray, combine: np.ufunc, core: Core
) -> Schedule:
    """Runs ``core`` on the largest power of two, with the vectors of all ranks.

    Args:
        comm: the communicator.
        tag: the collective's tag.
        given: this rank's vector; only read, and may be ``buffer``.
        buffer: receives the result.
        combine: a commutative and associative NumPy ufunc of two arguments.
        core: the algorithm.
    """

    def take_in(source: int) -> Schedule:
        yield from exchange(comm, tag, target=buffer, source=source, own=given, combine=combine)

    yield from _folded(comm, tag, given, buffer, take_in, core)


class CombineVectors(Protocol):
    """Combines the lower ranks' vector with the upper ranks' into a third one, which it returns."""

    def __call__(self, lower: np.ndarray, upper: np.ndarray, /, *, out: np.ndarray) -> np.ndarray:
        """Combines two vectors into ``out``."""
        ...


def folded_whole(
    comm: Communicator,
    tag: int,
    given: np.ndarray,
    buffer: np.ndarray,
    combine: CombineVectors,
    core: Core,
) -> Schedule:
    """Runs ``core`` like `folded`, with a combination that needs to see whole vectors.

    Args:
        comm: the communicator.
        tag: the collective's tag.
        given: this rank's vector; only read, and may be ``buffer``.
        buffer: receives the result.
        combine: combines the lower rank's vector with the upper one's.
        core: the algorithm.
    """

    def take_in(source: int) -> Schedule:
        landing = comm.take(buffer.nbytes).view(buffer.dtype)
        yield from exchange(comm, tag, target=landing, source=source)
        combine(landing, given, out=buffer)

    yield from _folded(comm, tag, given, buffer, take_in, core)


def _folded(
    comm: Communicator,
    tag: int,
    given: np.ndarray,
    buffer: np.ndarray,
    take_in: Callable[[int], Schedule],
    core: Core,
) -> Schedule:
    size = 1 << (comm.size.bit_length() - 1)
    extra = comm.size - size
    paired = comm.rank < 2 * extra

    def rank_of(place: int) -> int:
        return 2 * place + 1 if place < extra else place + extra

    if paired and comm.rank % 2 == 0:
        yield from exchange(comm, tag, outgoing=given, destination=comm.rank + 1)
        yield from exchange(comm, tag, target=buffer, source=comm.rank + 1)
        return
    if paired:
        yield from take_in(comm.rank - 1)
        given = buffer
    yield from core(given, comm.rank // 2 if paired else comm.rank - extra, size, rank_of)
    if paired:
        yield from exchange(comm, tag, outgoing=buffer, destination=comm.rank - 1)
