"""Flat vectors: where the variables of a shard lie in one vector for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True)
class Span:
    """A part of a vector.

    Attributes:
        vector: index of the vector.
        begin: index of the first element.
        end: index behind the last element.
    """

    vector: int
    begin: int
    end: int


class Layout:
    """Variables in flat vectors, one for each dtype, in the order of the variables.

    One vector is sent, converted, averaged and updated in a fraction of the time that as many elements take in an array
    for each variable.

    Args:
        shapes: of the variables.
        dtypes: of the variables.
        included: which of them the vectors contain; all by default.

    Attributes:
        dtypes: of the vectors, in the order in which the variables have them.
        lengths: elements of the vectors.
        spans: by variable, where its elements are; without those that are not included.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[np.dtype],
        included: Sequence[bool] | None = None,
    ) -> None:
        self._shapes = list(shapes)
        kept = [place for place in range(len(shapes)) if included is None or included[place]]
        self.dtypes = tuple(dict.fromkeys(np.dtype(dtypes[place]) for place in kept))
        lengths = dict.fromkeys(self.dtypes, 0)
        self.spans: dict[int, Span] = {}
        for place in kept:
            dtype, size = np.dtype(dtypes[place]), prod(shapes[place])
            self.spans[place] = Span(self.dtypes.index(dtype), lengths[dtype], lengths[dtype] + size)
            lengths[dtype] += size
        self.lengths = tuple(lengths.values())

    def check(self, vectors: Sequence[np.ndarray]) -> None:
        """Checks that vectors are as this layout describes.

        Raises:
            ValueError: with what was expected and what came.
        """
        found = [(vector.dtype.name, vector.shape) for vector in vectors]
        expected = [(dtype.name, (length,)) for dtype, length in zip(self.dtypes, self.lengths, strict=True)]
        if found != expected:
            raise ValueError(f"vectors {found}; expected {expected}")

    def array(self, place: int, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """The array of one variable: a view of its vector.

        Args:
            place: index of the variable.
            vectors: as `dtypes` and `lengths` describe them.
        """
        span = self.spans[place]
        return vectors[span.vector][span.begin : span.end].reshape(self._shapes[place])

    def arrays(self, vectors: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """The arrays of all variables that are included, by index: views of the vectors."""
        return {place: self.array(place, vectors) for place in self.spans}

    def vectors(self, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """The vectors of arrays, one for each variable; of those that are not included None."""
        made = [np.empty(length, dtype) for dtype, length in zip(self.dtypes, self.lengths, strict=True)]
        for place, span in self.spans.items():
            made[span.vector][span.begin : span.end] = np.reshape(arrays[place], -1)  # type: ignore[arg-type]
        return made
