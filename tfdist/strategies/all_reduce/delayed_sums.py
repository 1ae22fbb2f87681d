"""Sums of gradients that are exchanged while the next step computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compression.compressor import Compressor
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import host_call
from tfdist.local_sgd.exchanges import Exchanges, PendingSum
from tfdist.private.optimizers import key_of


class DelayedSums:
    """The sums of one optimizer's gradients: those of a step are summed during the next one.

    Args:
        group: the processes, which all take the same steps.
        name: name of the optimizer in messages, the same on all processes.
        variables: Keras variables whose gradients are summed.
        compressor: compressor of gradients; None sends full precision.

    Attributes:
        variables: Keras variables whose gradients are summed.
        staleness: how often each staleness occurred: the number of updates between a gradient's computation and its
            use.
    """

    def __init__(self, group: ProcessGroup, name: str, variables: Sequence[Any], compressor: Compressor | None) -> None:
        self.variables = list(variables)
        self.staleness: Counter[int] = Counter()
        keys = [key_of(weight) for weight in variables]
        self._exchanges = Exchanges(group, name, [variable.path for variable in variables], compressor, keys)
        if compressor is not None:
            shapes = [(weight.path, tuple(weight.shape)) for weight in variables]
            compressor.register(dict(zip(keys, shapes, strict=True)))
        self._under_way: PendingSum | None = None
        self._late = 0

    def exchanged(self, gradients: Sequence[tf.Tensor], weight: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Begins to sum gradients, and takes the sums of the step before; in a graph or eagerly.

        Args:
            gradients: dense gradients of this process.
            weight: factor of this process's gradients in the sums, a float64 scalar.

        Returns:
            Whether there was a step before, a boolean scalar; and the sums of its gradients, or zeros.
        """

        def call(factor: np.ndarray, *given: np.ndarray) -> list[np.ndarray]:
            sums = self._taken()
            self._under_way = self._exchanges.begin(range(len(given)), given, float(factor), overlaps=True)
            if sums is None:
                return [np.array(False), *map(np.zeros_like, given)]
            # Copies: a variable that takes over the memory of a tensor would write into buffers of the engine.
            return [np.array(True), *(gradient.copy() for gradient in sums)]

        specs = [tf.TensorSpec([], tf.bool), *(tf.TensorSpec(given.shape, given.dtype) for given in gradients)]
        ready, *totals = host_call(call, [weight, *gradients], specs, name="tfdist_delayed_sums")
        return ready, totals

    def last(self) -> list[np.ndarray] | None:
        """Returns the sums of the last step, or None if they have been taken; all processes call it after a step."""
        sums = self._taken()
        self._late = 0
        return sums

    def _taken(self) -> list[np.ndarray] | None:
        if self._under_way is None:
            return None
        under_way, self._under_way = self._under_way, None
        sums = self._exchanges.finish(under_way)
        self.staleness[self._late] += 1
        self._late = 1
        return sums
