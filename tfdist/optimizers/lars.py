"""LARS: stochastic gradient descent with a rate for each variable, from the norms of its weights and gradient."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.optimizers import place_of


@keras.saving.register_keras_serializable("tfdist")
class LARS(keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling (LARS), an optimizer for large batches.

    For each variable with weights w and gradient g, with m of momentum::

        rate = learning_rate * trust_coefficient * ‖w‖ / (‖g‖ + weight_decay * ‖w‖ + epsilon)
        m = momentum * m + rate * (g + weight_decay * w)
        w = w - m

    Variables of one dimension (biases, and scales of normalization), excluded variables, and variables whose weights or
    gradient are zero use the plain ``learning_rate``; the first two kinds have no weight decay either. The learning
    rate is that of the whole batch: see `tfdist.callbacks.LearningRateScaling` for warm-up.

    Args:
        learning_rate: a number or a schedule.
        momentum: decay of the momentum, at least 0 and less than 1.
        weight_decay: coefficient of the weights in the gradient.
        trust_coefficient: length of a step, relative to the weights' norm.
        epsilon: small number against division by zero.
        nesterov: whether to use Nesterov momentum, as in `keras.optimizers.SGD`.
        exclude: regular expressions; variables whose path contains a match are excluded.
        name: name of the optimizer.
        **kwargs: arguments of `keras.optimizers.Optimizer`: clipping, moving averages, accumulation, loss scale.

    References:
        You, Gitman and Ginsburg, Large batch training of convolutional networks, 2017.
    """

    def __init__(
        self,
        learning_rate: float | Callable[..., Any] = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        epsilon: float = 1e-9,
        nesterov: bool = False,
        exclude: Sequence[str] = (),
        name: str = "lars",
        **kwargs: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"LARS takes a momentum of at least 0 and less than 1; got {momentum}")
        if weight_decay < 0 or trust_coefficient <= 0:
            raise ValueError(
                "LARS takes a weight_decay of at least 0 and a positive trust_coefficient; got "
                f"{weight_decay} and {trust_coefficient}"
            )
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.nesterov = nesterov
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        self.exclude = list(exclude)
        self._decay = weight_decay  # not `weight_decay`, which Keras applies to the weights themselves

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the variables for momentum."""
        if self.built:
            return
        super().build(variables)
        self._momenta = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable."""
        dense = tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
        ops, dtype = keras.ops, variable.dtype
        weights, dense, rate = (ops.cast(tensor, dtype) for tensor in (variable, dense, learning_rate))
        if self._adapts(variable):
            weight_norm, norm = (ops.sqrt(ops.sum(ops.square(tensor))) for tensor in (weights, dense))
            trust = self.trust_coefficient * weight_norm / (norm + self._decay * weight_norm + self.epsilon)
            rate *= ops.where(ops.logical_and(weight_norm > 0, norm > 0), trust, ops.ones_like(trust))
            dense += self._decay * weights
        momentum = self._momenta[place_of(self, variable)]
        step = self.momentum * ops.cast(momentum, dtype) + rate * dense
        self.assign(momentum, step)
        self.assign_sub(variable, self.momentum * step + rate * dense if self.nesterov else step)

    def _adapts(self, variable: Any) -> bool:
        path = getattr(variable, "path", None) or variable.name
        return len(variable.shape) > 1 and not any(re.search(pattern, path) for pattern in self.exclude)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration with LARS's own arguments."""
        names = ("momentum", "nesterov", "trust_coefficient", "epsilon", "exclude")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}, "weight_decay": self._decay}
