"""The features of a shard beside the updates themselves; each takes part in what concerns it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.compression.policy import Policy
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.protocol.differences import EncodedAnswer, ParameterEncoder
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import Push
from tfdist.parameter_server.protocol.packing import Unpacker, VariableSpec
from tfdist.parameter_server.shard.delay_compensation import DelayCompensation, Now


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


class CompressedPushes(ShardFeature):
    """Gradients that workers compress.

    Args:
        policy: policy by which they compress.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._unpacker: Unpacker | None = None

    def begin(self, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        """Chooses the methods for the variables."""
        self._unpacker = Unpacker(self._policy, variables, shapes)

    def received(self, message: Push, arrays: list[np.ndarray]) -> PushedGradients | None:
        """Returns the decoded gradients of a push."""
        assert self._unpacker is not None
        return self._unpacker.received(message.kinds, arrays, message.sequence)


class CompressedAnswers(ShardFeature):
    """Parameters that are sent as compressed differences from what each worker has.

    Args:
        policy: policy by which they are compressed.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._encoder: ParameterEncoder | None = None

    def begin(self, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        """Chooses the methods for the variables."""
        self._encoder = ParameterEncoder(self._policy, variables, shapes)

    def attached(self, worker: int) -> None:
        """Makes the next answer to a worker whole."""
        self.forget(worker)

    def forget(self, worker: int) -> None:
        """Drops the copy of what a worker has."""
        if self._encoder is not None:
            self._encoder.forget(worker)

    def encoded(self, message: Push, values: PushedGradients) -> EncodedAnswer | None:
        """Returns the differences from what the worker has."""
        assert self._encoder is not None
        return self._encoder.answered(message, values)


class CompensatedDelays(ShardFeature):
    """Late gradients that are corrected for the change of the parameters meanwhile.

    Args:
        policy: rate and decay of the correction.
    """

    def __init__(self, policy: DelayCompensated) -> None:
        self._policy = policy
        self._compensation: DelayCompensation | None = None

    def begin(self, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        """Begins without parameters that workers have read."""
        self._compensation = DelayCompensation(self._policy, shapes)

    def forget(self, worker: int) -> None:
        """Drops the parameters that a worker has read."""
        if self._compensation is not None:
            self._compensation.forget(worker)

    def corrected(self, worker: int, version: int, gradients: PushedGradients, now: Now) -> PushedGradients:
        """Returns the gradients with the correction."""
        assert self._compensation is not None
        return self._compensation.corrected(worker, version, gradients, now)

    def sent(self, worker: int, version: int, now: Now) -> None:
        """Keeps the parameters that a worker reads."""
        assert self._compensation is not None
        self._compensation.sent(worker, version, now)


def parts_of(arguments: Arguments) -> list[ShardFeature]:
    """Returns the features of a shard that takes what workers push.

    Args:
        arguments: the strategy's arguments.
    """
    parts: list[ShardFeature] = []
    if arguments.compression is not None:
        parts.append(CompressedPushes(arguments.compression))
    if arguments.pull_compression is not None:
        parts.append(CompressedAnswers(arguments.pull_compression))
    if isinstance(arguments.synchronization.late, DelayCompensated):
        parts.append(CompensatedDelays(arguments.synchronization.late))
    return parts
