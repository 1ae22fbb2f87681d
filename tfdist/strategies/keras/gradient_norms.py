"""The noise of gradients, estimated from norms that are available when gradients are summed over replicas.

Replica r has the mean gradient g_r of n_r samples; the mean gradient of all N samples is G = Σ_r (n_r / N) g_r. If
single samples' gradients have the mean g and, summed over all weights, the variance S, then

    E ‖G‖² = ‖g‖² + S / N    and    E Σ_r (n_r / N) ‖g_r‖² = ‖g‖² + P S / N

with P replicas that have samples. Both unknowns follow, without bias. The norms of the replicas' gradients are added up
with the gradients themselves.

Source: McCandlish, Kaplan, Amodei et al., *An empirical model of large-batch training*, 2018, appendix A.1, here with
shares of unequal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Noise:
    """Estimates of the noise of gradients, each summed over steps.

    Attributes:
        variance: sum of the estimates of S, the variance of single samples' gradients.
        signal: sum of the estimates of ‖g‖², the squared norm of the mean gradient.
        steps: number of steps that were measured.
    """

    variance: float = 0.0
    signal: float = 0.0
    steps: int = 0

    def since(self, before: Noise) -> Noise:
        """Returns the estimates of the steps after an earlier reading.

        Args:
            before: the earlier reading.
        """
        return Noise(self.variance - before.variance, self.signal - before.signal, self.steps - before.steps)


class GradientNorms:
    """Adds up the estimates of steps; all processes have the same sums."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            self._sums = tf.Variable(tf.zeros([3], tf.float64), trainable=False, name="tfdist_gradient_noise")

    def own(self, gradients: Sequence[Any], weight: Any, is_weighed: bool) -> tf.Tensor:
        """Returns a replica's term of the norms, to be summed with the gradients and weighted as they are.

        Args:
            gradients: gradients of the replica, dense or sparse.
            weight: the replica's part of all samples, a float64 scalar.
            is_weighed: whether the gradients have been multiplied by the weight; if not, the sum does so.

        Returns:
            A vector of two elements, of the gradients' dtype; the sum over replicas is Σ_r (n_r / N) ‖g_r‖² and P.
        """
        squares = squared_norm(gradients)
        inverse = tf.math.reciprocal_no_nan(weight)
        has_samples = tf.cast(weight > 0, tf.float64)
        if is_weighed:  # ‖w g‖² / w
            term = tf.stack([tf.math.multiply_no_nan(squares, inverse), has_samples])
        else:
            term = tf.stack([squares, has_samples * inverse])
        return tf.cast(term, _wide(gradients[0].dtype))

    def add(self, summed: Sequence[Any], norms: tf.Tensor, samples: Any) -> None:
        """Adds the estimates of a step, if at least two replicas had samples and the gradients are finite.

        Args:
            summed: the mean gradients of all samples, G.
            norms: the sum of the terms that `own` returned on the replicas.
            samples: the number of all samples, N; a scalar tensor or a number.
        """
        large, (small, replicas) = squared_norm(summed), tf.unstack(tf.cast(norms, tf.float64))
        count = tf.cast(samples, tf.float64)
        others = tf.round(replicas) - 1
        variance = tf.math.divide_no_nan((small - large) * count, others)
        signal = large - tf.math.divide_no_nan(variance, count)
        tells = tf.logical_and(others > 0, tf.math.is_finite(variance + signal))
        estimates = tf.stack([variance, signal, tf.constant(1.0, tf.float64)])
        self._sums.assign_add(tf.where(tells, estimates, tf.zeros_like(estimates)), read_value=False)

    def read(self) -> Noise:
        """Returns the estimates of all steps until now."""
        variance, signal, steps = self._sums.numpy().tolist()
        return Noise(variance, signal, round(steps))


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the sum of the squares of all elements, a float64 scalar.

    Args:
        gradients: gradients, dense or sparse; rows of a sparse one with the same index are added first.
    """
    total = tf.constant(0.0, tf.float64)
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            rows, places = tf.unique(gradient.indices)
            gradient = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
        total += tf.cast(tf.reduce_sum(tf.square(tf.abs(tf.cast(gradient, _wide(gradient.dtype))))), tf.float64)
    return total


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype.size < 4 else dtype
