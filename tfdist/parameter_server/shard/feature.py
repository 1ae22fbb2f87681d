"""What a feature of a shard beside the updates themselves may take part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tfdist.parameter_server.protocol.differences import EncodedAnswer
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import Push
from tfdist.parameter_server.protocol.packing import VariableSpec

Now = Callable[[], Sequence[np.ndarray]]
"""Reads the current parameters, in the layout of all variables. It copies them, and nobody may change the copy."""


class ShardFeature:
    """A feature of a shard. A method that a feature does not override does nothing."""

    def begin(self, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        """Prepares for the shard's variables.

        Args:
            variables: paths and whole shapes of the variables.
            shapes: shapes and dtypes of the shard's parts of them.
        """

    def attached(self, worker: int) -> None:
        """Notes that a worker has attached, and may lack answers that were sent to it."""

    def forget(self, worker: int) -> None:
        """Drops what is kept for a worker that has left or is lost; it may be unknown."""

    def received(self, message: Push, arrays: list[np.ndarray]) -> PushedGradients | None:
        """Returns the gradients of a push, if the feature knows how they are encoded.

        Raises:
            ValueError: the arrays do not fit the variables.
        """
        return None

    def corrected(self, worker: int, version: int, gradients: PushedGradients, now: Now) -> PushedGradients:
        """Returns late gradients as they are to be applied.

        Args:
            worker: number of the worker.
            version: version of the parameters that the gradients were computed at.
            gradients: the worker's gradients.
            now: function that reads the current parameters.
        """
        return gradients

    def encoded(self, message: Push, values: PushedGradients) -> EncodedAnswer | None:
        """Returns the answer to a push, if the feature encodes it.

        Args:
            message: the push.
            values: the values that are newer than the worker's.
        """
        return None

    def sent(self, worker: int, version: int, now: Now) -> None:
        """Notes that a worker gets the current parameters.

        Args:
            worker: number of the worker.
            version: version of the parameters.
            now: function that reads the current parameters.
        """
