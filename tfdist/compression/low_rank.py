"""Base of methods that send a matrix as the product of two thin ones."""

from __future__ import annotations

import math

import numpy as np

from tfdist.compression.method import Method, saturate, segments

ROWS_BYTES = 4


class LowRank(Method):
    """Sends two factors: the number of rows (uint32), a matrix of rows by r, and one of r by columns."""

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Multiplies the two factors; see `Method`."""
        rows = int(np.frombuffer(body[:ROWS_BYTES].tobytes(), np.uint32)[0])
        factors = np.frombuffer(body[ROWS_BYTES:].tobytes(), out.dtype)
        columns = out.size // rows
        rank = factors.size // (rows + columns)
        left, right = factors[: rows * rank].reshape(rows, rank), factors[rows * rank :].reshape(rank, columns)
        matrix = out.reshape(rows, columns)
        # Intermediate results may overflow although the product does not; then compute it from scaled-down factors.
        bounds = [float(np.abs(factor).max(initial=0)) for factor in (left, right)]
        shift = max(0, sum(math.frexp(bound)[1] for bound in (*bounds, rank)) - np.finfo(out.dtype).maxexp)
        left = np.ldexp(left, -shift) if shift else left
        many = max(1, (1 << 15) // columns)
        product = np.empty((min(many, rows), columns), out.dtype)
        for part in segments(rows, many):
            here = matrix[part] if combine is None else product[: part.stop - part.start]
            np.matmul(left[part], right, out=here)
            if shift:
                saturate(np.ldexp(here, shift, out=here))
            if combine is not None:
                combine(matrix[part], here, out=matrix[part])


def pack_factors(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the body of two factors of the same dtype, of shapes (rows, r) and (r, columns)."""
    head = np.frombuffer(np.uint32(len(left)).tobytes(), np.uint8)
    return np.concatenate([head, *(np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in (left, right))])


def as_matrix(vector: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
    """Returns a flat tensor as a matrix of all other axes by the last; nearly square if its shape is unknown."""
    if shape and len(shape) > 1 and shape[-1] > 0:
        return vector.reshape(-1, shape[-1])
    columns = int(vector.size**0.5)
    while vector.size % columns:
        columns -= 1
    return vector.reshape(-1, columns)
