"""The features of a shard beside the updates themselves, by the strategy's arguments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.compression.policy import Policy
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import Push
from tfdist.parameter_server.protocol.packing import Unpacker, VariableSpec
from tfdist.parameter_server.shard.compressed_answers import CompressedAnswers
from tfdist.parameter_server.shard.delay_compensation import DelayCompensation
from tfdist.parameter_server.shard.feature import ShardFeature


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


def features_of(arguments: Arguments) -> list[ShardFeature]:
    """Returns the features of a shard that takes what workers push.

    Args:
        arguments: the strategy's arguments.
    """
    features: list[ShardFeature] = []
    if arguments.compression is not None:
        features.append(CompressedPushes(arguments.compression))
    if arguments.pull_compression is not None:
        features.append(CompressedAnswers(arguments.pull_compression))
    if isinstance(arguments.synchronization.late, DelayCompensated):
        features.append(DelayCompensation(arguments.synchronization.late))
    return features
