"""A host's server's copy of the parameters of the roots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tfdist.parameter_server.protocol.changes import Changes, Edition
from tfdist.parameter_server.protocol.gradients import Kind, PushedGradients, Shapes
from tfdist.parameter_server.protocol.state import HeldRows
from tfdist.parameter_server.shard.private_values import PrivateValues


class Mirror(PrivateValues):
    """A copy of the roots' values without an optimizer, in place of a `Store`.

    Args:
        held: descriptions of the variables.
        shapes: shapes and dtypes of the variables.
        optimizer: the roots' optimizer, serialized by `keras.saving.serialize_keras_object`.

    Attributes:
        held: descriptions of the variables.
        shapes: shapes and dtypes of the variables.
        config: the roots' optimizer, serialized.
        iterations: number of updates that the roots' optimizer had made to these values.
        rate: the chief's learning rate for the next push; None if the chief has sent none.
    """

    def __init__(self, held: Sequence[HeldRows], shapes: Shapes, optimizer: dict[str, Any]) -> None:
        self.held = list(held)
        self.shapes = shapes
        self.config = optimizer
        self.iterations = 0
        self.rate: float | None = None
        self._vectors: list[np.ndarray] = []
        self._changes = Changes(shapes.shapes, [dtype.itemsize for dtype in shapes.dtypes])

    @property
    def edition(self) -> Edition:
        """The edition of the current values; see `Changes`."""
        return self._changes.edition

    def put(self, vectors: list[np.ndarray], iterations: int) -> None:
        """Replaces the values by newer ones.

        Args:
            vectors: values in the layout of all variables; nobody may write to them later.
            iterations: number of updates of the roots' optimizer.
        """
        self._vectors = vectors
        self.iterations = iterations
        self._changes.note(range(len(self.held)), {})

    def vectors(self) -> list[np.ndarray]:
        """Returns the values, in the layout of all variables."""
        return self._vectors

    def arrays(self) -> list[np.ndarray]:
        """Returns the values, one array for each variable."""
        return list(self.shapes.layout().arrays(self._vectors).values())

    def since(self, edition: Edition | None = None, places: Collection[int] = ()) -> PushedGradients:
        """Returns all values, whatever edition the receiver has: on one host, bytes are cheap."""
        dense: Kind = "dense"
        return PushedGradients((dense,) * len(self.held), self._vectors)

    def set_learning_rate(self, value: float) -> None:
        """Keeps the learning rate for the next push.

        Args:
            value: the chief's learning rate.
        """
        self.rate = value
