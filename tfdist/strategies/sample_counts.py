"""How many samples each replica has in the current step, and how many there are in all.

A replica's mean over its own samples counts as much as its share of the samples. With unequal shares (a last
partial batch, a shard that ends early, fewer samples than replicas) a mean of means would end elsewhere than one
process on the whole batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def batch_size(batch: Any) -> tf.Tensor:
    """The number of samples of a batch, an int64 scalar: the first dimension of its first component."""
    for component in tf.nest.flatten(batch):
        if isinstance(component, tf.SparseTensor):
            return tf.cast(component.dense_shape[0], tf.int64)
        if isinstance(component, tf.RaggedTensor):
            return tf.cast(component.nrows(), tf.int64)
        if isinstance(component, tf.experimental.Optional) or component is None:
            continue
        if tf.convert_to_tensor(component).shape.rank == 0:
            return tf.constant(1, tf.int64)
        return tf.shape(component, out_type=tf.int64)[0]
    return tf.constant(0, tf.int64)


class SampleCounts:
    """The counts of one strategy's current step.

    ``total`` is set by whoever brings the step's data; the replicas add their own counts when they begin.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            self._total = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfdist_samples_in_step")
        self._own = threading.local()
        self._replicas: dict[int, tf.Tensor] = {}

    def set_total(self, total: tf.Tensor) -> tf.Operation | tf.Tensor:
        """Notes how many samples all replicas of all processes have together; returns the operation that does."""
        return self._total.assign(total, read_value=False) or tf.no_op()

    @contextlib.contextmanager
    def replica(self, replica_id: int, samples: tf.Tensor) -> Iterator[None]:
        """Around the work of one local replica on its samples (an int64 scalar)."""
        self._own.samples, self._own.total = samples, self._total.read_value()
        self._replicas[replica_id] = samples
        try:
            yield
        finally:
            self._own.samples = self._own.total = None
            self._replicas.pop(replica_id, None)

    @property
    def active(self) -> bool:
        """Whether the calling thread is inside `replica`."""
        return getattr(self._own, "samples", None) is not None

    def own(self) -> tf.Tensor:
        """How many samples the calling replica has in this step, an int64 scalar."""
        return self._own.samples

    def own_is_empty(self) -> tf.Tensor:
        """Whether the calling replica has no samples in this step, a boolean scalar."""
        return tf.equal(self._own.samples, 0)

    def weigh(self, value: tf.Tensor) -> tf.Tensor:
        """A mean over this replica's samples times its share of all samples: what the sum over replicas needs."""
        return self._scaled(value, self._own.samples, self._own.total)

    def unweigh(self, value: tf.Tensor) -> tf.Tensor:
        """The inverse of `weigh`; zero for a replica that has no samples."""
        return self._scaled(value, self._own.total, self._own.samples)

    def _scaled(self, value: tf.Tensor, dividend: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
        ratio = tf.math.divide_no_nan(tf.cast(dividend, tf.float64), tf.cast(divisor, tf.float64))
        # A mean over no samples may be undefined, and is still nothing.
        return tf.where(self.own_is_empty(), tf.zeros_like(value), value * tf.cast(ratio, value.dtype))

    def of_replicas(self) -> list[tf.Tensor]:
        """The samples of each local replica, int64 scalars; none outside of counted steps."""
        return [self._replicas[replica] for replica in sorted(self._replicas)]

    def process_contributes(self) -> tf.Tensor | None:
        """Whether any local replica has samples, a boolean scalar; None outside of counted steps."""
        if not self._replicas:
            return None
        return tf.reduce_any([samples > 0 for samples in self._replicas.values()])
