"""The gradients of a push, and their weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tfdist.parameter_server.protocol.layout import Layout

Kind = Literal["none", "dense", "sparse", "packed"]
"""Kind of a gradient: absent; an array; rows and their indices, which may repeat; or, in messages only, compressed
(`tfdist.parameter_server.protocol.packing`)."""


class Shapes:
    """The variables of a shard, and the layouts of gradients for them.

    Args:
        shapes: shape of each variable.
        dtypes: dtype of each variable.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> None:
        self.shapes = list(shapes)
        self.dtypes = list(dtypes)
        self._layouts: dict[tuple[Kind, ...], Layout] = {}

    @property
    def nbytes(self) -> int:
        """Number of bytes of all variables."""
        layout = self.layout()
        return sum(dtype.itemsize * length for dtype, length in zip(layout.dtypes, layout.lengths, strict=True))

    def layout(self, kinds: Sequence[Kind] | None = None) -> Layout:
        """Returns the layout of the dense gradients.

        Args:
            kinds: one kind for each variable; all are dense by default.
        """
        key: tuple[Kind, ...] = tuple(["dense"] * len(self.shapes) if kinds is None else kinds)
        if key not in self._layouts:
            self._layouts[key] = Layout(self.shapes, self.dtypes, [kind == "dense" for kind in key])
        return self._layouts[key]


@dataclass(frozen=True)
class PushedGradients:
    """Gradients, one for each variable of a shard.

    Attributes:
        kinds: kind of each gradient.
        vectors: dense gradients, in the layout for these kinds.
        sparse: by variable, rows of shape ``(n, *shape[1:])`` and int indices of shape ``(n,)``.
    """

    kinds: tuple[Kind, ...]
    vectors: list[np.ndarray]
    sparse: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def received(cls, kinds: Sequence[Kind], arrays: Sequence[np.ndarray], shapes: Shapes) -> PushedGradients:
        """Makes gradients from the arrays of a message: the vectors, then rows and indices of each sparse gradient.

        Args:
            kinds: one kind for each variable; empty if all are dense.
            arrays: arrays of the message.
            shapes: the shard's variables.

        Raises:
            ValueError: the arrays do not fit the variables.
        """
        if not kinds:
            kinds = ["dense"] * len(shapes.shapes)
        if len(kinds) != len(shapes.shapes):
            raise ValueError(f"{len(kinds)} gradients for {len(shapes.shapes)} variables")
        if "packed" in kinds:
            raise ValueError("got a packed gradient, but this server was started without compression")
        layout = shapes.layout(kinds)
        places = [place for place, kind in enumerate(kinds) if kind == "sparse"] if "sparse" in kinds else []
        expected = len(layout.dtypes) + 2 * len(places)
        if len(arrays) != expected:
            raise ValueError(f"got {len(arrays)} arrays of gradients; expected {expected}")
        vectors, rest = list(arrays[: len(layout.dtypes)]), iter(arrays[len(layout.dtypes) :])
        layout.check(vectors)
        sparse = {place: (next(rest), next(rest)) for place in places}
        for place, (rows, indices) in sparse.items():
            _check_rows(rows, indices, shapes.shapes[place])
        return cls(tuple(kinds), vectors, sparse)

    def copy(self) -> PushedGradients:
        """Returns a copy in memory of its own."""
        sparse = {place: (rows.copy(), indices.copy()) for place, (rows, indices) in self.sparse.items()}
        return PushedGradients(self.kinds, [vector.copy() for vector in self.vectors], sparse)

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays of a message, as `received` expects them."""
        return [*self.vectors, *(array for pair in self.sparse.values() for array in pair)]


def _check_rows(rows: np.ndarray, indices: np.ndarray, shape: tuple[int, ...]) -> None:
    if not shape or indices.ndim != 1 or indices.dtype.kind not in "iu" or rows.shape != (len(indices), *shape[1:]):
        raise ValueError(f"rows of shape {rows.shape} with indices of shape {indices.shape} for a variable of {shape}")
    if indices.size and not 0 <= indices.min() <= indices.max() < shape[0]:
        raise ValueError(f"got rows from {indices.min()} to {indices.max()} of a variable with {shape[0]} rows")


def distinct_rows(rows: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and indices of a sparse gradient, in which rows with the same index are summed."""
    distinct, places = np.unique(indices, return_inverse=True)
    if len(distinct) == len(indices):
        return rows, indices
    sums = np.zeros((len(distinct), *rows.shape[1:]), rows.dtype)
    np.add.at(sums, places.reshape(-1), rows)
    return sums, distinct


def weighted_sum(pushes: Sequence[PushedGradients], weights: Sequence[float], shapes: Shapes) -> PushedGradients:
    """Returns the sum of gradients, each times its weight. It is sparse for variables whose gradients are all sparse.

    Args:
        pushes: gradients of one or more pushes.
        weights: weight of each push.
        shapes: the shard's variables.
    """
    if len(pushes) == 1 and weights[0] == 1:
        return pushes[0]
    if all(push.kinds == pushes[0].kinds for push in pushes):
        vectors = [
            _summed([push.vectors[place] for push in pushes], weights) for place in range(len(pushes[0].vectors))
        ]
        sparse = {place: _rows([push.sparse[place] for push in pushes], weights) for place in pushes[0].sparse}
        return PushedGradients(pushes[0].kinds, vectors, sparse)
    return _sum_of_kinds(pushes, weights, shapes)


def _sum_of_kinds(pushes: Sequence[PushedGradients], weights: Sequence[float], shapes: Shapes) -> PushedGradients:
    """Sums variable by variable, because some have gradients of different kinds."""
    dense = [shapes.layout(push.kinds).arrays(push.vectors) for push in pushes]
    kinds: list[Kind] = []
    totals: list[np.ndarray | None] = []
    sparse = {}
    for place in range(len(shapes.shapes)):
        given = [(arrays[place], weight) for arrays, weight in zip(dense, weights, strict=True) if place in arrays]
        rows = [
            (push.sparse[place], weight) for push, weight in zip(pushes, weights, strict=True) if place in push.sparse
        ]
        total = _summed([array for array, _ in given], [weight for _, weight in given]) if given else None
        if rows:
            together = _rows([pair for pair, _ in rows], [weight for _, weight in rows])
            if total is None:
                sparse[place] = together
            else:
                np.add.at(total, together[1], together[0])
        totals.append(total)
        kinds.append("dense" if given else "sparse" if rows else "none")
    return PushedGradients(tuple(kinds), shapes.layout(kinds).vectors(totals), sparse)


def _summed(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    total = _scaled(arrays[0], weights[0])
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        total += _scaled(array, weight)
    return total


def _rows(pairs: Sequence[tuple[np.ndarray, np.ndarray]], weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    rows = np.concatenate([_scaled(rows, weight) for (rows, _), weight in zip(pairs, weights, strict=True)])
    return rows, np.concatenate([indices for _, indices in pairs])


def _scaled(array: np.ndarray, weight: float) -> np.ndarray:
    """Returns a new array."""
    return array * array.dtype.type(weight)
