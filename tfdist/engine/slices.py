"""Sums of sparse rows over processes: gathered, or dense if that sends fewer bytes."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.engine import operations
from tfdist.engine.call_sites import call_site
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import HOST, host_call
from tfdist.engine.weights import checked_weight, weighted, weighted_in_graph
from tfdist.tensors import to_array, to_tensor


class Slices:
    """All-reduces of `tf.IndexedSlices`.

    Args:
        group: the processes that take part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @tf.autograph.experimental.do_not_convert
    def all_reduce(
        self,
        slices: tf.IndexedSlices,
        contributes: tf.Tensor | None = None,
        keep_rows: bool = True,
        weight: tf.Tensor | None = None,
    ) -> tf.IndexedSlices:
        """Sums sparse rows over all processes.

        Gathering sends every process's rows to all and keeps the rows separate, so that an optimizer treats a row that
        occurs more than once as it does on one process. The dense form sends the whole variable about twice, for any
        number of rows.

        Args:
            slices: rows of a variable; an index may occur more than once.
            contributes: boolean scalar; false if this process has no samples, and so no rows.
            keep_rows: whether every occurrence of a row is kept. If not, and the dense shape is known, rows are summed
                if that sends fewer bytes. The same on all processes.
            weight: float64 scalar that this process's floating-point rows are multiplied by; with 0 this process has no
                rows. Replaces ``contributes``.

        Returns:
            The rows of all processes, in the order of their ranks, after `with_distinct_rows`; or every row of the
            dense sum.
        """
        slices, dense_shape = _as_tensors(slices)
        if weight is not None and contributes is not None:
            raise ValueError(
                "all_reduce takes either weight or contributes; got both. Pass a weight of 0 if there are no samples."
            )
        share = contributes if weight is None else checked_weight(weight, [slices.values])
        if self._group.size == 1:
            values = slices.values if weight is None else weighted_in_graph(slices.values, share)
            return tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        key = f"slices of {slices.values.dtype.name}"
        operands = [tf.constant(True) if share is None else share, slices.values, slices.indices]
        if not keep_rows and dense_shape is not None:
            operands.append(dense_shape)
            key += ", or their sum"
        if tf.executing_eagerly():
            values, indices = self._host_slices(f"eager {key}", *operands)
        else:
            site = call_site(key, self._group.members)
            values, indices = host_call(
                lambda *arguments: self._host_slices(site, *arguments),
                operands,
                [slices.values.dtype, slices.indices.dtype],
                name="tfdist_slices",
            )
            values.set_shape([None, *slices.values.shape[1:]])
            indices.set_shape([None])
        return with_distinct_rows(tf.IndexedSlices(values, indices, dense_shape))

    def _host_slices(
        self,
        key: str,
        share: tf.Tensor,
        values: tf.Tensor,
        indices: tf.Tensor,
        dense_shape: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers rows; or, with a dense shape, sums them if that sends fewer bytes.

        The number of rows is known only at run time, so the processes first gather it, to make the same choice.
        """
        rows, places = to_array(values), to_array(indices)
        if not float(tf.cast(share, tf.float64)):
            rows, places = rows[:0], places[:0]
        elif share.dtype == tf.float64:
            room = self._group.take(rows.nbytes).view(rows.dtype)
            rows = weighted(rows.reshape(-1), float(share), room).reshape(rows.shape)

        def gather(what: str, array: np.ndarray) -> np.ndarray:
            return self._group.run(f"{key}: {what}", operations.all_gather_rows(array))[0]

        if dense_shape is None:
            return to_tensor(gather("rows", rows)), to_tensor(gather("indices", places))
        shape = tuple(int(size) for size in np.asarray(dense_shape))
        counts = gather("count", np.array([len(rows)], np.int64))
        row_bytes = int(np.prod(shape[1:])) * rows.dtype.itemsize
        if int(counts.sum()) * (row_bytes + places.itemsize) < 2 * shape[0] * row_bytes:
            return to_tensor(gather("rows", rows)), to_tensor(gather("indices", places))
        dense = self._group.take(shape[0] * row_bytes).view(rows.dtype).reshape(shape)
        dense[...] = 0
        np.add.at(dense, places, rows)
        total = operations.all_reduce(dense.reshape(-1), self._group.choose(dense.nbytes))
        self._group.run(f"{key}: dense", total)
        return to_tensor(dense), tf.range(shape[0], dtype=indices.dtype)


def with_distinct_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up rows of the same index, on the host, if TensorFlow has GPUs; otherwise returns the slices unchanged.

    A GPU adds rows of the same index in an order that differs from run to run and between ranks, so that the ranks'
    weights would drift apart. Because of the summation, optimizers that square gradients square the sum of a row's
    occurrences.
    """
    if not tf.config.get_visible_devices("GPU"):
        return slices
    with tf.device(HOST):
        indices, places = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _as_tensors(slices: tf.IndexedSlices) -> tuple[tf.IndexedSlices, tf.Tensor | None]:
    """Converts the components of slices, which may be lists, to tensors; and the dense shape, if known, to int64."""
    shape = None if slices.dense_shape is None else tf.cast(slices.dense_shape, tf.int64)
    values, indices = tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)
    return tf.IndexedSlices(values, indices, shape), shape
