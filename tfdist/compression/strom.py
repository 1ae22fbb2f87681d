"""Strom's method: a threshold, and one bit for each element that reaches it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist.compression import sparse
from tfdist.compression.method import Method
from tfdist.compression.payload import HEADER_BYTES
from tfdist.compression.sparsifiers import wanted
from tfdist.compression.state import State


@dataclass(frozen=True)
class Strom(Method):
    """For each element of magnitude at least τ, its index and its sign, decoded as ±τ. Biased, not linear.

    The rest stays in the residual (`ErrorFeedback`), including the part of an element beyond τ. Indices are
    entropy-coded: if one of 800 elements is sent, 12 bits per element including the sign, against the paper's 32; that
    is 2100 ×.

    Args:
        tau: τ, above zero, in the units of the summed loss's gradient on one rank.
        density: instead of τ, the fraction of the elements that is sent. In each step, on each rank and for each
            tensor, τ is chosen so that this fraction reaches it. A τ adjusted from step to step would oscillate,
            because elements that were not sent return in the residual.

    Raises:
        ValueError: neither is given, or both, or one is out of its range.

    References:
        Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015.
    """

    tau: float | None = None
    density: float | None = None
    number = 14

    def __post_init__(self) -> None:
        if (self.tau is None) == (self.density is None):
            got = "neither" if self.tau is None else f"tau={self.tau} and density={self.density}"
            raise ValueError(f"Strom needs tau, or density to choose tau from the data; got {got}")
        if self.tau is not None and not self.tau > 0:
            raise ValueError(f"tau must be above 0; got {self.tau}")
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(f"density must be a fraction of the elements, above 0 and at most 1; got {self.density}")

    def payload_bytes(self, elements: int) -> float:
        """Returns the estimated bytes of a payload; with a fixed τ, if one element of 800 is sent, as in the paper."""
        density = self.density or 1 / 800
        return HEADER_BYTES + 33 + elements * density * (1 + np.log2(np.e / density)) / 8

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes the indices and signs of the elements that reach τ; see `Method`.

        The body is sparse, with one bit per element, set if it is negative, followed by τ.
        """
        if self.density is None:
            assert self.tau is not None
            tau = np.float32(self.tau)
            indices = sparse.at_least(vector, self.tau)
        else:
            indices = sparse.largest(vector, wanted(self.density, vector.size))
            tau = np.abs(vector[indices]).min(initial=np.inf).astype(np.float32)
        tail = np.array([tau], np.float32)
        return sparse.pack(indices, vector.size, np.packbits(np.signbit(vector[indices])), tail)

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Sets the elements that were sent to ±τ; see `Method`."""
        indices, rest = sparse.unpack(body, out.size)
        sign_bytes = -(-indices.size // 8)
        tau = sparse.values_of(rest[sign_bytes:], np.dtype(np.float32), 1)[0]
        values = np.where(np.unpackbits(rest[:sign_bytes], count=indices.size), -tau, tau)
        sparse.scatter(out, indices, values.astype(out.dtype), combine)
