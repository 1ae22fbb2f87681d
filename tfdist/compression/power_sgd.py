"""PowerSGD: low rank by one power iteration per step, starting from the last step's result."""

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
    """The projection of the summed gradient onto a few directions, which are updated in every step.

    Biased, and linear: two thin matrices are sent, each summed over the ranks. Made for `ErrorFeedback`.

    Args:
        rank: the rank of the approximation, with a tensor reshaped to a matrix of all other axes by the last.

    Raises:
        ValueError: ``rank`` is below 1.

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
        """Returns the estimated bytes of a payload for a square matrix; they depend on the shape."""
        return HEADER_BYTES + ROWS_BYTES + 8 * self.rank * elements**0.5

    def rounds(self, vector: np.ndarray, state: State) -> Generator[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """Sums the two factors over all ranks, one after the other; see `Method`."""
        matrix = as_matrix(vector, state.shape)
        rank = min(self.rank, *matrix.shape)
        factor = state.arrays.get("factor")
        wanted = (matrix.shape[1], rank), vector.dtype
        if factor is None or (factor.shape, factor.dtype) != wanted or not factor.any():
            factor = state.generator(shared=True).standard_normal((matrix.shape[1], rank)).astype(vector.dtype)
        # Scaling by powers of two keeps products and their sums over all ranks within the dtype's range. Only the
        # directions of the first sum matter; the scale of the second is undone in the other factor.
        rows, columns = matrix.shape
        total = yield (matrix @ np.ldexp(factor, -_bits(4 * columns * state.size))).reshape(-1)
        _, exponent = np.frexp(np.abs(total).max())
        directions, _ = np.linalg.qr(np.ldexp(total.reshape(rows, rank), -exponent))
        shift = _bits(rows**0.5 * state.size)
        product = matrix.T @ np.ldexp(directions, -shift)
        total = yield product.reshape(-1).copy()
        total = total.reshape(product.shape)
        # Scaled to 1, as only its directions matter; the product of two scales could overflow or underflow.
        state.arrays["factor"] = total / (np.abs(total).max() or 1)
        left = np.ldexp(directions, shift)
        return pack_factors(left, total.T), pack_factors(left, product.T)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes the vector of a single process; the body is that of `LowRank`. See `Method`."""
        rounds = self.rounds(vector, state)
        try:
            total = next(rounds)
            while True:
                total = rounds.send(total)
        except StopIteration as stop:
            return stop.value[0]


def _bits(bound: float) -> int:
    """Returns the smallest integer n with 2ⁿ at least the bound."""
    return math.ceil(math.log2(bound))
