"""The first value of a row, computed from a seed and the row's key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tfdist.parameter_server.options.key_hash import GAMMA, mix

_KEYS_AT_ONCE = 2048
"""Number of keys computed at a time, so that their intermediate arrays stay in the cache."""


@dataclass(frozen=True)
class InitialRows:
    """Random rows that depend on the seed and the key only.

    So a row is the same on every worker and server, whenever its key is first seen, and also after an eviction.
    Each key begins a SplitMix64 sequence, from which its columns are drawn in order.

    Attributes:
        distribution: "uniform" between ``mean`` − ``scale`` and ``mean`` + ``scale``, or "normal" with the standard
            deviation ``scale``. Uniform rows are equal to the last bit on all platforms, normal ones up to the
            rounding of the platform's logarithm and cosine.
        scale: spread around ``mean``, at least 0; with 0 every element is ``mean``. The default is that of
            `keras.layers.Embedding`.
        mean: mean of each element.
        seed: any number of 64 bits.
    """

    distribution: Literal["uniform", "normal"] = "uniform"
    scale: float = 0.05
    mean: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.distribution not in ("uniform", "normal"):
            raise ValueError(f'distribution must be "uniform" or "normal"; got {self.distribution!r}')
        if not (self.scale >= 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale must be at least 0 and finite; got {self.scale!r}")

    def rows(self, keys: np.ndarray, dim: int, dtype: np.dtype) -> np.ndarray:
        """Returns the rows of keys.

        Args:
            keys: keys, int64 [n].
            dim: number of columns.
            dtype: float32 or float64.

        Returns:
            A new array [n, dim].
        """
        rows = np.empty((len(keys), dim), dtype)
        for begin in range(0, len(keys), _KEYS_AT_ONCE):
            part = slice(begin, begin + _KEYS_AT_ONCE)
            rows[part] = self._noise(keys[part], (dim + 1) // 2, dtype)[:, :dim]
        rows *= dtype.type(self.scale)
        rows += dtype.type(self.mean)
        return rows

    def _noise(self, keys: np.ndarray, pairs: int, dtype: np.dtype) -> np.ndarray:
        """Returns numbers that are uniform between −1 and 1, or standard normal: [n, 2 ``pairs``]."""
        seed = mix(np.array([self.seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
        starts = mix(keys.view(np.uint64) ^ seed)
        words = mix(starts[:, np.newaxis] + np.arange(1, pairs + 1, dtype=np.uint64) * np.uint64(GAMMA))
        halves = words.astype("<u8", copy=False).view("<u4")
        if self.distribution == "uniform":
            return halves.view("<i4").astype(dtype) * dtype.type(2.0**-31)
        units = (halves.astype(dtype).reshape(-1, pairs, 2) + dtype.type(0.5)) * dtype.type(2.0**-32)  # above 0
        radius = np.sqrt(-2 * np.log(units[..., 0]))
        angle = dtype.type(2 * np.pi) * units[..., 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(len(keys), -1)
