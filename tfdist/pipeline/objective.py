"""The objective of a pipeline: a loss of the model's outputs, for the whole batch or for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.private.models import logits_of
from tfdist.strategies.divided import weight_parts
from tfdist.strategies.keras.keras_losses import scale_summed_loss

Loss = Callable[[list[Any], int | None], tf.Tensor]
"""Function that computes a loss from the model's outputs and a micro-batch's number, or None for the whole batch."""


class OutputGradient(NamedTuple):
    """The gradient of a loss for one output of a model.

    Attributes:
        output: gradient of the output itself; None if the loss does not use it.
        logits: gradient of the logits, which Keras uses for a crossentropy instead of their softmax or sigmoid; None
            without logits.
    """

    output: Any
    logits: Any


class Objective:
    """The gradients of a loss, in the order in which the last stage needs them.

    If all forward passes precede the first backward pass, the loss is computed once, for the whole batch: it may be any
    function of the samples. Otherwise it is computed for each micro-batch, and must be a mean over samples.

    Args:
        loss: computes the loss, a scalar, or a vector of the samples' losses.
        batch: the batch in micro-batches.
        of_batch: whether the loss is computed for the whole batch.
        variables: trainable variables of the last stage, which the loss may use.
        scale: a factor for the gradients, such as a loss scale.

    Attributes:
        scale: as given.
        losses: losses that have been computed, weighted by samples.
    """

    def __init__(
        self,
        loss: Loss,
        batch: MicroBatches,
        of_batch: bool,
        variables: Sequence[Any] = (),
        scale: Any = 1.0,
    ) -> None:
        self.scale = scale
        self.losses: list[tf.Tensor] = []
        self._loss = loss
        self._batch = batch
        self._of_batch = of_batch
        self._variables = list(variables)
        self._outputs: dict[int, list[Any]] = {}
        self._gradients: dict[int, list[OutputGradient]] = {}

    def take(self, number: int, outputs: list[Any]) -> None:
        """Stores the model's outputs for a micro-batch.

        Args:
            number: number of the micro-batch.
            outputs: outputs in the model's order.
        """
        self._outputs[number] = outputs

    def gradients(self, number: int) -> tuple[list[OutputGradient], list[tuple[Any, Any]]]:
        """Returns the gradients of a micro-batch's outputs, and the variables that the loss uses with their gradients.

        Args:
            number: number of the micro-batch.
        """
        if not self._of_batch:
            outputs = self._outputs.pop(number)
            return self._differentiated(outputs, number, self._batch.weight(number))
        of_variables: list[tuple[Any, Any]] = []
        if not self._gradients:
            outputs = [self._outputs[place] for place in range(self._batch.count)]
            whole = [self._batch.joined(parts) for parts in zip(*outputs, strict=True)]
            output_gradients, of_variables = self._differentiated(whole, None, tf.ones([], tf.float64))
            for place in range(self._batch.count):
                self._gradients[place] = [
                    OutputGradient(*(self._of_part(gradient, place) for gradient in pair)) for pair in output_gradients
                ]
            self._outputs.clear()
        return self._gradients.pop(number), of_variables

    def _of_part(self, gradient: Any, number: int) -> Any:
        """Returns a micro-batch's rows of a gradient; zeros for a stand-in row."""
        if gradient is None:
            return None
        part = self._batch.part(tf.convert_to_tensor(gradient), number)
        return tf.math.multiply_no_nan(part, tf.cast(self._batch.rows[number] > 0, part.dtype))

    def _differentiated(
        self, outputs: list[Any], number: int | None, weight: tf.Tensor
    ) -> tuple[list[OutputGradient], list[tuple[Any, Any]]]:
        logits = [logits_of(source) for source in outputs]
        sources = [*outputs, *(source for source in logits if source is not None)]
        with tf.GradientTape() as tape:
            tape.watch([source for source in sources if source.dtype.is_floating or source.dtype.is_complex])
            loss = self._loss(outputs, number)
            if loss.shape.rank:  # of single samples: the gradient is that of their sum
                self.losses.append(tf.reduce_mean(tf.cast(loss, tf.float64)) * weight)
                loss = tf.reduce_sum(scale_summed_loss(loss)) * tf.cast(tf.math.reciprocal_no_nan(weight), loss.dtype)
            else:
                self.losses.append(tf.cast(loss, tf.float64) * weight)
        values = [weight_parts.source_of(source) for source in self._variables]
        upstream = tf.cast(weight * tf.cast(self.scale, tf.float64), loss.dtype)
        gradients = iter(tape.gradient(loss, [*sources, *values], output_gradients=upstream))
        of_outputs = [next(gradients) for _ in outputs]
        of_logits = [None if source is None else next(gradients) for source in logits]
        of_variables = zip(self._variables, gradients, strict=True)
        pairs = [OutputGradient(*pair) for pair in zip(of_outputs, of_logits, strict=True)]
        return pairs, [(source, gradient) for source, gradient in of_variables if gradient is not None]
