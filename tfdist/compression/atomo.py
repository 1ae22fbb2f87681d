"""ATOMO: a random sample of the atoms that a gradient is a sum of, with the least variance for its size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist.compression import sparse
from tfdist.compression.low_rank import ROWS_BYTES, LowRank, as_matrix, pack_factors
from tfdist.compression.method import saturate
from tfdist.compression.payload import HEADER_BYTES
from tfdist.compression.sparsifiers import Sparsifier, check_ratio, estimated_bytes, wanted
from tfdist.compression.state import State


@dataclass(frozen=True)
class Atomo(Sparsifier):
    """ATOMO with entries as atoms: each is sent with a probability that grows with its magnitude; 79 × at 1 %.

    Unbiased, with the least variance for the expected number of entries; not linear.

    Args:
        ratio: the fraction of the entries that is sent on average.

    Raises:
        ValueError: ``ratio`` is not above 0 and at most 1.

    References:
        Wang et al., ATOMO: communication-efficient learning via atomic sparsification, 2018.
    """

    ratio: float = 0.01
    number = 15
    unbiased = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def payload_bytes(self, elements: int) -> float:
        """Returns the estimated bytes of a payload; see `Method`."""
        return estimated_bytes(self.ratio, elements)

    def variance(self, elements: int) -> float:
        """Returns the maximum, which is reached if all entries have the same magnitude; see `Method`."""
        return elements / wanted(self.ratio, elements) - 1

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes a random sample of the entries; see `Method`."""
        chances = probabilities(np.abs(vector), wanted(self.ratio, vector.size))
        # float64: float32 would round small chances up to multiples of 2 ** -24.
        indices = np.flatnonzero(state.generator().random(vector.size) < chances)
        with np.errstate(over="ignore"):
            values = saturate(vector[indices] / chances[indices])
        return sparse.pack(indices, vector.size, values)


@dataclass(frozen=True)
class AtomoSVD(LowRank):
    """ATOMO with singular triples as atoms: each is sent with a probability that grows with its singular value.

    Unbiased, with the least variance for the expected number of triples; not linear. The singular value decomposition
    of every matrix costs far more than the step itself; see `PowerSGD` for low rank without one.

    Args:
        rank: the average number of triples sent, with a tensor reshaped to a matrix of all other axes by the last.

    Raises:
        ValueError: ``rank`` is below 1.

    References:
        Wang et al., ATOMO: communication-efficient learning via atomic sparsification, 2018 (spectral ATOMO).
    """

    rank: int = 3
    number = 16
    unbiased = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1; got {self.rank}")

    def payload_bytes(self, elements: int) -> float:
        """Returns the estimated bytes of a payload for a square matrix; they depend on the shape."""
        return HEADER_BYTES + ROWS_BYTES + 4 * self.rank * (2 * elements**0.5 + 1)

    def variance(self, elements: int) -> float:
        """Returns the bound for a square matrix with equal singular values; see `Method`."""
        return max(0.0, elements**0.5 / self.rank - 1)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes a random sample of the singular triples; see `Method`.

        The body is that of `LowRank`: left vectors times their weights, and right vectors.
        """
        matrix = as_matrix(vector, state.shape)
        # Scaled by powers of two: the decomposition works on values near 1, and both factors stay in the dtype's range.
        _, exponent = np.frexp(np.abs(vector).max())
        left, values, right = np.linalg.svd(np.ldexp(matrix, -exponent), full_matrices=False)
        chances = probabilities(values, min(self.rank, values.size))
        chosen = np.flatnonzero(state.generator().random(values.size) < chances)
        shift = matrix.shape[1].bit_length() // 2
        weighted = left[:, chosen] * (values[chosen] / chances[chosen])
        with np.errstate(over="ignore"):
            weighted = saturate(np.ldexp(weighted.astype(vector.dtype), exponent - shift))
        return pack_factors(weighted, np.ldexp(right[chosen], shift))


def probabilities(magnitudes: np.ndarray, budget: float) -> np.ndarray:
    """Returns the probability of sending each atom, for the least variance of the sum: algorithm 1 of the paper.

    Probabilities are proportional to the magnitudes. Those that would exceed 1 are set to 1, and the rest of the budget
    is distributed over the other atoms.

    Args:
        magnitudes: magnitudes of the atoms, not negative.
        budget: the average number of atoms to send, at most all.
    """
    chances = np.zeros_like(magnitudes)
    largest = magnitudes.max(initial=0)
    if not largest:
        return chances
    # Scaled, so that sums neither overflow nor underflow.
    scaled = magnitudes / largest
    certain = np.zeros(magnitudes.shape, bool)
    while True:
        rest = scaled[~certain].sum(dtype=np.float64)
        if not rest:
            break
        factor = (budget - np.count_nonzero(certain)) / rest
        more = ~certain & (scaled * factor >= 1)
        if not more.any():
            np.multiply(scaled, factor, out=chances, where=~certain)
            break
        certain |= more
    chances[certain] = 1
    return chances
