"""Shares: each replica's part of a step's global batch.

A replica's mean over its share is weighted by the share's part of all samples. With unequal shares (a last partial
batch, a shard that ends early, fewer samples than replicas) an unweighted mean of means would differ from the mean of
one process over the whole batch.

An empty share holds one stand-in row, because some TensorFlow kernels fail without rows. Its results have weight zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.private import tensorflow as private
from tfdist.private.keras import tree
from tfdist.tensors import map_values


class Share(NamedTuple):
    """One replica's part of a global batch.

    Attributes:
        data: the data, structured as the dataset yields it, with at least one row.
        rows: the number of rows that are samples (all or none), an int64 scalar.
    """

    data: Any
    rows: tf.Tensor


class ShareWithOwnLogs(Share):
    """A share of a step whose logs are its process's own until the epoch ends; its own type makes functions retrace."""


def batch_size(batch: Any) -> tf.Tensor:
    """Returns the number of samples of a batch, an int64 scalar: the rows of its first component that has rows."""
    if isinstance(batch, Share):
        return batch.rows
    rows = rows_of_components(batch)
    if rows:
        return next(iter(rows.values()))
    components = [component for component in tf.nest.flatten(batch) if not _is_left_out(component)]
    return tf.constant(int(bool(components)), tf.int64)  # if all components are scalars


def static_rows(share: Share) -> int | None:
    """Returns the static number of rows of a share's data; None if it is not known."""
    rows = next(iter(rows_of_components(share.data).values()), None)
    known = None if rows is None else tf.get_static_value(rows)
    return None if known is None else int(known)


def rows_of_components(batch: Any) -> dict[str, tf.Tensor]:
    """Returns the number of rows, an int64 scalar, of each component that has rows, by its path in the batch.

    Args:
        batch: a batch of a dataset.
    """
    rows = {}
    for path, component in tree.flatten_with_path(batch):
        if isinstance(component, tf.SparseTensor):
            count = tf.cast(component.dense_shape[0], tf.int64)
        elif isinstance(component, tf.RaggedTensor):
            count = tf.cast(component.nrows(), tf.int64)
        elif _is_left_out(component) or tf.convert_to_tensor(component).shape.rank == 0:
            continue
        else:
            count = _rows_of_tensor(tf.convert_to_tensor(component))
        rows["/".join(map(str, path)) or "the batch"] = count
    return rows


def _rows_of_tensor(tensor: tf.Tensor) -> tf.Tensor:
    is_static = tensor.shape.rank is not None and tensor.shape[0] is not None
    return tf.constant(tensor.shape[0], tf.int64) if is_static else tf.shape(tensor, out_type=tf.int64)[0]


def _is_left_out(component: Any) -> bool:
    return isinstance(component, tf.experimental.Optional) or component is None


def as_share(batch: Any) -> Share:
    """Returns a batch as a share. A batch without rows gets a stand-in row of zeros."""
    if isinstance(batch, Share):
        return batch
    rows = batch_size(batch)
    known = tf.get_static_value(rows)
    if known:
        return Share(batch, rows)
    components = tf.nest.flatten(batch)
    places = [place for place, component in enumerate(components) if _may_lack_rows(component)]

    def as_they_are() -> list[Any]:
        return [components[place] for place in places]

    def rows_of_zeros() -> list[Any]:
        return [_row_of_zeros(components[place]) for place in places]

    filled = rows_of_zeros() if known == 0 else tf.cond(rows > 0, as_they_are, rows_of_zeros)
    for place, component in zip(places, filled, strict=True):
        components[place] = component
    return Share(tf.nest.pack_sequence_as(batch, components), rows)


def _may_lack_rows(component: Any) -> bool:
    if _is_left_out(component):
        return False
    return isinstance(component, (tf.RaggedTensor, tf.SparseTensor)) or tf.convert_to_tensor(component).shape.rank != 0


def _row_of_zeros(component: Any) -> Any:
    if isinstance(component, tf.RaggedTensor):
        return tf.concat([component, tf.RaggedTensor.from_row_lengths(component.values[:0], [0])], 0)
    if isinstance(component, tf.SparseTensor):
        shape = tf.concat([tf.ones([1], tf.int64), component.dense_shape[1:]], 0)
        return tf.SparseTensor(component.indices, component.values, shape)
    if component.shape[1:].is_fully_defined():
        return tf.zeros([1, *component.shape[1:]], component.dtype)
    row = tf.zeros(tf.concat([[1], tf.shape(component)[1:]], 0), component.dtype)
    return tf.ensure_shape(row, [1, *component.shape[1:]])


class Shares:
    """The shares of a strategy's current step.

    The numbers are held in variables, so that functions that were traced before can read them.

    Args:
        devices: the number of local replicas.

    Attributes:
        static: static number of rows of the current step's shares, with stand-ins; None if it is not known.
        has_marked: whether the current step has marked losses of single samples by `tfdist.scale_summed_loss`.
    """

    def __init__(self, devices: int) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            self._total = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfdist_samples_in_step")
            self._tally = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfdist_samples_of_an_epoch")
            self._rows = [
                tf.Variable(0, dtype=tf.int64, trainable=False, name=f"tfdist_samples_of_replica_{device}")
                for device in range(devices)
            ]
        self.static: int | None = None
        self.has_marked = False
        self._active: set[int] = set()
        self._read: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def set_total(self, total: tf.Tensor) -> tf.Operation | tf.Tensor:
        """Sets the number of samples of all replicas of all processes; returns the assigning operation."""
        return self._total.assign(total, read_value=False) or tf.no_op()

    def tally(self, samples: tf.Tensor | int) -> tf.Operation | tf.Tensor:
        """Adds to the samples that processes compare when an epoch ends; returns the assigning operation."""
        return self._tally.assign_add(samples, read_value=False) or tf.no_op()

    def take_tally(self) -> int:
        """Returns the samples that `tally` has added since the last call; only eagerly."""
        samples = int(self._tally)
        self._tally.assign(0)
        return samples

    @contextlib.contextmanager
    def replica(self, rows: tf.Tensor, static: int | None = None) -> Iterator[None]:
        """Context for the calling replica's work on its share.

        Args:
            rows: the number of its samples, an int64 scalar.
            static: the static number of rows of its share.
        """
        self.static, self.has_marked = static, False
        replica_id = private.local_replica_id()
        self._rows[replica_id].assign(rows, read_value=False)
        self._active.add(replica_id)
        try:
            yield
        finally:
            self._active.discard(replica_id)

    @contextlib.contextmanager
    def read_before(self) -> Iterator[None]:
        """Context in which `rows` and `total` return tensors of the graph in which the context begins.

        For functions that XLA compiles, which cannot read variables of the host.
        """
        replica_id = private.local_replica_id()
        self._read[replica_id] = self.rows(), self.total()
        try:
            yield
        finally:
            del self._read[replica_id]

    @property
    def active(self) -> bool:
        """Whether the caller is a replica inside the context of `replica`."""
        return private.local_replica_id() in self._active

    @property
    def step_is_shared(self) -> bool:
        """Whether the replicas of this process are working on shares; for callers outside of a replica."""
        return bool(self._active)

    def rows(self) -> tf.Tensor:
        """Returns the number of the calling replica's samples, an int64 scalar."""
        replica_id = private.local_replica_id()
        return self._read[replica_id][0] if replica_id in self._read else self._rows[replica_id].read_value()

    def rows_of_replicas(self) -> list[tf.Tensor]:
        """Returns the number of each local replica's samples, int64 scalars."""
        return [rows.read_value() for rows in self._rows]

    def total(self) -> tf.Tensor:
        """Returns the number of samples of all replicas of all processes, an int64 scalar."""
        read = self._read.get(private.local_replica_id())
        return self._total.read_value() if read is None else read[1]

    def is_empty(self) -> tf.Tensor:
        """Returns whether the calling replica has no samples, a boolean scalar."""
        return tf.equal(self.rows(), 0)

    def weight(self) -> tf.Tensor:
        """Returns the calling replica's fraction of all samples, a float64 scalar; all replicas' weights sum to one."""
        return tf.math.divide_no_nan(tf.cast(self.rows(), tf.float64), tf.cast(self.total(), tf.float64))

    def inverse_weight(self) -> tf.Tensor:
        """Returns the factor that turns a share's part of a sum into a term of the weighted mean; 0 if it is empty."""
        return tf.math.divide_no_nan(tf.cast(self.total(), tf.float64), tf.cast(self.rows(), tf.float64))


def weighed(value: Any, weight: tf.Tensor) -> Any:
    """Returns a dense or sparse value times a weight; exactly zero if the weight is zero, also for NaN and infinity.

    Args:
        value: a tensor, or `tf.IndexedSlices`, of a floating or complex dtype.
        weight: a float64 scalar.
    """
    return map_values(lambda tensor: tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype)), value)
