"""PowerSGD: low rank by one power iteration a step, which goes on where the last one ended."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from tfdist.compression.low_rank import ROWS_BYTES, LowRank, as_matrix, pack_factors
from tfdist.compression.method import Route
from tfdist.compression.payload import HEADER_BYTES
from tfdist.compression.state import State


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """The projection of the summed gradient onto a few directions, which follow it from step to step.

    Biased, and linear: two thin matrices travel, and each adds up. Made for `ErrorFeedback`.

    Args:
        rank: of what is sent, of a tensor seen as a matrix of its last axis by all others.

    Raises:
        ValueError: it is below 1.

    References:
        Vogels et al., PowerSGD: practical low-rank gradient compression for distributed optimization, 2019.
    """

    rank: int = 4
    number = 17
    route = Route.ALL_REDUCE

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1; got {self.rank}")

    def payload_bytes(self, elements: int) -> float:
        """See `Method`. Depends on the shape; this is of a square."""
        return HEADER_BYTES + ROWS_BYTES + 8 * self.rank * elements**0.5

    def rounds(self, vector: np.ndarray, state: State) -> Generator[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """See `Method`."""
        matrix = as_matrix(vector, state.shape)
        rank = min(self.rank, *matrix.shape)
        factor = state.arrays.get("factor")
        wanted = (matrix.shape[1], rank), vector.dtype
        if factor is None or (factor.shape, factor.dtype) != wanted or not factor.any():
            factor = state.generator(shared=True).standard_normal((matrix.shape[1], rank)).astype(vector.dtype)
        # Powers of two keep products and their sums over all ranks within the vector's range. Of the first sum only
        # directions matter; of the second, the other factor gets back what is taken here.
        rows, columns = matrix.shape
        total = yield (matrix @ np.ldexp(factor, -_bits(4 * columns * state.size))).reshape(-1)
        _, exponent = np.frexp(np.abs(total).max())
        directions, _ = np.linalg.qr(np.ldexp(total.reshape(rows, rank), -exponent))
        shift = _bits(rows**0.5 * state.size)
        own = matrix.T @ np.ldexp(directions, -shift)
        total = yield own.reshape(-1).copy()
        total = total.reshape(own.shape)
        # Only its directions matter; the product of two scales may overflow, or vanish.
        state.arrays["factor"] = total / (np.abs(total).max() or 1)
        left = np.ldexp(directions, shift)
        return pack_factors(left, total.T), pack_factors(left, own.T)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """See `Method`; as of a single process. The body is that of `LowRank`."""
        rounds = self.rounds(vector, state)
        try:
            total = next(rounds)
            while True:
                total = rounds.send(total)
        except StopIteration as stop:
            return stop.value[0]


def _bits(bound: float) -> int:
    """So many that 2 to their power is at least the bound."""
    return math.ceil(math.log2(bound))
