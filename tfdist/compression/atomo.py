"""ATOMO: a random few of the atoms that a gradient is a sum of, with the least variance for their number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist.compression import sparse
from tfdist.compression.method import Method, segments
from tfdist.compression.payload import HEADER_BYTES
from tfdist.compression.sparsifiers import Sparsifier, check_ratio, estimated_bytes, wanted
from tfdist.compression.state import State

_COUNT_BYTES = 4


@dataclass(frozen=True)
class Atomo(Sparsifier):
    """Entries as atoms: each is sent with a probability that grows with its magnitude; 79 × at 1 %.

    Unbiased, of the least variance for the expected number of entries; not linear.

    Args:
        ratio: share of the entries that is sent on average.

    Raises:
        ValueError: the ratio is no share.

    References:
        Wang et al., ATOMO: communication-efficient learning via atomic sparsification, 2018.
    """

    ratio: float = 0.01
    number = 15
    unbiased = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def payload_bytes(self, elements: int) -> float:
        """See `Method`."""
        return estimated_bytes(self.ratio, elements, 4)

    def variance(self, elements: int) -> float:
        """See `Method`: it is largest where all entries are alike."""
        return elements / wanted(self.ratio, elements) - 1

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """See `Method`."""
        chances = probabilities(np.abs(vector), wanted(self.ratio, vector.size))
        indices = np.flatnonzero(state.generator().random(vector.size, dtype=chances.dtype.type) < chances)
        return sparse.pack(indices, vector.size, vector[indices] / chances[indices])


@dataclass(frozen=True)
class AtomoSVD(Method):
    """Singular triples as atoms, each sent with a probability that grows with its singular value.

    Unbiased, of the least variance for the expected number of triples; not linear. A singular value decomposition of
    every matrix costs far more than the step itself; see `PowerSGD` for low rank without one.

    Args:
        rank: triples that are sent on average, of a tensor seen as a matrix of its last axis by all others.

    Raises:
        ValueError: it is below 1.

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
        """See `Method`. Depends on the shape; this is of a square."""
        return HEADER_BYTES + _COUNT_BYTES + 4 * self.rank * (2 * elements**0.5 + 1)

    def variance(self, elements: int) -> float:
        """See `Method`: of a square whose singular values are alike."""
        return max(0.0, elements**0.5 / self.rank - 1)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """See `Method`. The body is the number of rows (uint32), and left and right vectors, times their weight."""
        matrix = as_matrix(vector, state.shape)
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        chances = probabilities(values, min(self.rank, values.size))
        chosen = np.flatnonzero(state.generator().random(values.size) < chances)
        weighted = left[:, chosen] * (values[chosen] / chances[chosen])
        head = np.frombuffer(np.uint32(len(matrix)).tobytes(), np.uint8)
        factors = [np.ascontiguousarray(part, vector.dtype).reshape(-1) for part in (weighted, right[chosen])]
        return np.concatenate([head, np.concatenate(factors).view(np.uint8)])

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """See `Method`."""
        rows = int(np.frombuffer(body[:_COUNT_BYTES].tobytes(), np.uint32)[0])
        factors = np.frombuffer(body[_COUNT_BYTES:].tobytes(), out.dtype)
        store_product(factors, rows, out, combine)


def as_matrix(vector: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
    """A flat tensor as a matrix of its last axis by all others; of nearly a square if its shape is not known."""
    if shape and len(shape) > 1 and shape[-1] > 0:
        return vector.reshape(-1, shape[-1])
    columns = int(vector.size**0.5)
    while vector.size % columns:
        columns -= 1
    return vector.reshape(-1, columns)


def store_product(factors: np.ndarray, rows: int, out: np.ndarray, combine: np.ufunc | None) -> None:
    """Combines the matrix that two factors make with what lies in ``out``; overwrites it by default.

    Args:
        factors: of ``rows`` by r, and of r by the number of columns, one after the other.
        rows: of the matrix.
        out: the matrix, flat.
        combine: as of `Method.unpack`.
    """
    columns = out.size // rows
    rank = factors.size // (rows + columns)
    left, right = factors[: rows * rank].reshape(rows, rank), factors[rows * rank :].reshape(rank, columns)
    matrix = out.reshape(rows, columns)
    many = max(1, (1 << 15) // columns)
    product = np.empty((min(many, rows), columns), out.dtype)
    for part in segments(rows, many):
        here = matrix[part] if combine is None else product[: part.stop - part.start]
        np.matmul(left[part], right, out=here)
        if combine is not None:
            combine(matrix[part], here, out=matrix[part])


def probabilities(magnitudes: np.ndarray, budget: float) -> np.ndarray:
    """With which chance each atom is sent, for the least variance of the sum: algorithm 1 of the paper.

    They are proportional to the magnitudes; what would exceed 1 is 1, and the others share what is left.

    Args:
        magnitudes: of the atoms, none negative.
        budget: atoms to be sent on average, at most all.
    """
    chances = np.zeros_like(magnitudes)
    largest = magnitudes.max(initial=0)
    if not largest:
        return chances
    # Scaled, so that sums neither overflow nor vanish.
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
