"""What part of a step's global batch each replica has: its share.

A replica's mean over its share counts as much as the share's part of all samples. With unequal shares (a last partial
batch, a shard that ends early, fewer samples than replicas) a mean of means would end elsewhere than one process on
the whole batch.

An empty share holds one row that stands in for samples, as TensorFlow's kernels cannot be trusted with none. Whatever
comes of it has weight zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.strategies import tensorflow_private as private


class Share(NamedTuple):
    """One replica's part of a global batch.

    Attributes:
        data: as the dataset yields it, with at least one row.
        rows: how many of its rows are samples, an int64 scalar: all of them, or none.
    """

    data: Any
    rows: tf.Tensor


def batch_size(batch: Any) -> tf.Tensor:
    """The number of samples of a batch, an int64 scalar: the first dimension of its first component that has one."""
    if isinstance(batch, Share):
        return batch.rows
    samples = 0
    for component in tf.nest.flatten(batch):
        if isinstance(component, tf.SparseTensor):
            return tf.cast(component.dense_shape[0], tf.int64)
        if isinstance(component, tf.RaggedTensor):
            return tf.cast(component.nrows(), tf.int64)
        if isinstance(component, tf.experimental.Optional) or component is None:
            continue
        if tf.convert_to_tensor(component).shape.rank != 0:
            return tf.shape(component, out_type=tf.int64)[0]
        samples = 1  # of scalars alone
    return tf.constant(samples, tf.int64)


def as_share(batch: Any) -> Share:
    """A batch as a share: one without rows gets a row of zeros to stand in for samples."""
    if isinstance(batch, Share):
        return batch
    rows = batch_size(batch)
    if tf.get_static_value(rows):
        return Share(batch, rows)
    components = tf.nest.flatten(batch)
    places = [place for place, component in enumerate(components) if _may_lack_rows(component)]

    def as_they_are() -> list[Any]:
        return [tf.identity(components[place]) for place in places]

    def rows_of_zeros() -> list[Any]:
        return [_row_of_zeros(components[place]) for place in places]

    for place, component in zip(places, tf.cond(rows > 0, as_they_are, rows_of_zeros), strict=True):
        components[place] = component
    return Share(tf.nest.pack_sequence_as(batch, components), rows)


def _may_lack_rows(component: Any) -> bool:
    if isinstance(component, tf.experimental.Optional) or component is None:
        return False
    return isinstance(component, (tf.RaggedTensor, tf.SparseTensor)) or tf.convert_to_tensor(component).shape.rank != 0


def _row_of_zeros(component: Any) -> Any:
    if isinstance(component, tf.RaggedTensor):
        return tf.concat([component, tf.RaggedTensor.from_row_lengths(component.values[:0], [0])], 0)
    if isinstance(component, tf.SparseTensor):
        shape = tf.concat([tf.ones([1], tf.int64), component.dense_shape[1:]], 0)
        return tf.SparseTensor(component.indices, component.values, shape)
    row = tf.zeros(tf.concat([[1], tf.shape(component)[1:]], 0), component.dtype)
    return tf.ensure_shape(row, [1, *component.shape[1:]])


class Shares:
    """The shares of one strategy's current step.

    The numbers lie in variables, so that they can be read inside of functions that were traced before.

    Args:
        devices: how many local replicas there are.
    """

    def __init__(self, devices: int) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            self._total = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfdist_samples_in_step")
            self._rows = [
                tf.Variable(0, dtype=tf.int64, trainable=False, name=f"tfdist_samples_of_replica_{device}")
                for device in range(devices)
            ]
        self._active: set[int] = set()

    def set_total(self, total: tf.Tensor) -> tf.Operation | tf.Tensor:
        """Notes how many samples all replicas of all processes have together; returns the operation that does."""
        return self._total.assign(total, read_value=False) or tf.no_op()

    @contextlib.contextmanager
    def replica(self, rows: tf.Tensor) -> Iterator[None]:
        """Around the work of the calling replica on its share.

        Args:
            rows: the number of its samples, an int64 scalar.
        """
        replica_id = private.local_replica_id()
        self._rows[replica_id].assign(rows, read_value=False)
        self._active.add(replica_id)
        try:
            yield
        finally:
            self._active.discard(replica_id)

    @property
    def active(self) -> bool:
        """Whether the caller is a replica inside of `replica`."""
        return private.local_replica_id() in self._active

    @property
    def step_is_shared(self) -> bool:
        """Whether the replicas of this process are at work on shares; for callers that are no replica."""
        return bool(self._active)

    def rows(self) -> tf.Tensor:
        """How many samples the calling replica has, an int64 scalar."""
        return self._rows[private.local_replica_id()].read_value()

    def rows_of_replicas(self) -> list[tf.Tensor]:
        """How many samples each local replica has, int64 scalars."""
        return [rows.read_value() for rows in self._rows]

    def total(self) -> tf.Tensor:
        """How many samples all replicas of all processes have together, an int64 scalar."""
        return self._total.read_value()

    def is_empty(self) -> tf.Tensor:
        """Whether the calling replica has no samples, a boolean scalar."""
        return tf.equal(self.rows(), 0)

    def weight(self) -> tf.Tensor:
        """The calling replica's part of all samples, a float64 scalar; these add up to one over all replicas."""
        return tf.math.divide_no_nan(tf.cast(self.rows(), tf.float64), tf.cast(self.total(), tf.float64))

    def inverse_weight(self) -> tf.Tensor:
        """What a share's part of a sum is multiplied by, as a mean will be taken of it; 0 of an empty share."""
        return tf.math.divide_no_nan(tf.cast(self.total(), tf.float64), tf.cast(self.rows(), tf.float64))


def weighed(value: Any, weight: tf.Tensor) -> Any:
    """A value times a weight, dense or sparse; exactly zero where the weight is, whatever the value.

    Args:
        value: a tensor, or `tf.IndexedSlices`, of a floating or complex dtype.
        weight: a float64 scalar.
    """
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(weighed(value.values, weight), value.indices, value.dense_shape)
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))
