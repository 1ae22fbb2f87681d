"""The parameters that a host's server has from the roots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tfdist.parameter_server.protocol.changes import Changes, Edition
from tfdist.parameter_server.protocol.gradients import Gradients, Kind, Shapes
from tfdist.parameter_server.protocol.state import Held


class Mirror:
    """Values without an optimizer, in the place of a `Store`: newer ones come from the roots.

    Args:
        held: describes the variables.
        shapes: of the variables.
        optimizer: of the roots, as `keras.saving.serialize_keras_object` describes it.

    Attributes:
        held: as given.
        shapes: as given.
        config: as ``optimizer``.
        iterations: updates that the roots' optimizer had made.
        rate: the chief's learning rate, for the next push; None if it has said none.
    """

    def __init__(self, held: Sequence[Held], shapes: Shapes, optimizer: dict[str, Any]) -> None:
        self.held = list(held)
        self.shapes = shapes
        self.config = optimizer
        self.iterations = 0
        self.rate: float | None = None
        self._vectors: list[np.ndarray] = []
        self._changes = Changes(shapes.shapes, [dtype.itemsize for dtype in shapes.dtypes])

    @property
    def edition(self) -> Edition:
        """Of the values."""
        return self._changes.edition

    def put(self, vectors: list[np.ndarray], iterations: int) -> None:
        """Takes newer values.

        Args:
            vectors: in the layout of all variables; nobody writes to them any more.
            iterations: of the roots' optimizer.
        """
        self._vectors = vectors
        self.iterations = iterations
        self._changes.note(range(len(self.held)), {})

    def vectors(self) -> list[np.ndarray]:
        """The values, in the layout of all variables."""
        return self._vectors

    def arrays(self) -> list[np.ndarray]:
        """The values, one array for each variable."""
        return list(self.shapes.layout().arrays(self._vectors).values())

    def since(self, edition: Edition | None = None, places: Collection[int] = ()) -> Gradients:
        """All values, whatever somebody has: on one host, bytes are cheap."""
        dense: Kind = "dense"
        return Gradients((dense,) * len(self.held), self._vectors)

    def set_learning_rate(self, value: float) -> None:
        """Notes the learning rate for the next push.

        Args:
            value: of the chief.
        """
        self.rate = value
