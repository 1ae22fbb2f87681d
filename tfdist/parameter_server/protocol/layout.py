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

    Sending, converting, averaging and updating one vector takes a fraction of the time that as many elements take in
    separate arrays.

    Args:
        shapes: shape of each variable.
        dtypes: dtype of each variable.
        included: for each variable, whether the vectors contain it; all by default.

    Attributes:
        dtypes: dtype of each vector, in the order in which the variables have them.
        lengths: number of elements of each vector.
        spans: by variable, where its elements are; without variables that are not included.
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
        self._forms = [(dtype, (length,)) for dtype, length in lengths.items()]

    def check(self, vectors: Sequence[np.ndarray]) -> None:
        """Checks that vectors fit this layout.

        Raises:
            ValueError: a vector has another dtype or length, or their number differs.
        """
        actual = [(vector.dtype, vector.shape) for vector in vectors]
        if actual != self._forms:
            raise ValueError(f"vectors {_named(actual)}; expected {_named(self._forms)}")

    def array(self, place: int, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the array of one variable: a view of its vector.

        Args:
            place: index of the variable.
            vectors: vectors in this layout.
        """
        span = self.spans[place]
        return vectors[span.vector][span.begin : span.end].reshape(self._shapes[place])

    def arrays(self, vectors: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """Returns the arrays of all included variables, by index: views of the vectors."""
        return {place: self.array(place, vectors) for place in self.spans}

    def vectors(self, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Joins arrays into vectors. There is an array for each variable; None is allowed where it is not included."""
        made = [np.empty(length, dtype) for dtype, length in zip(self.dtypes, self.lengths, strict=True)]
        for place, span in self.spans.items():
            made[span.vector][span.begin : span.end] = np.reshape(arrays[place], -1)  # type: ignore[arg-type]
        return made


def _named(forms: Sequence[tuple[np.dtype, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(dtype.name, shape) for dtype, shape in forms]
