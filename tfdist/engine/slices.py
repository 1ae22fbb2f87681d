"""Sums of sparse rows over processes: gathered, or dense if that sends fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.engine import operations, packed_rows
from tfdist.engine.call_sites import call_site
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import HOST, host_call
from tfdist.engine.pending import Pending
from tfdist.engine.row_vectors import Kinds, RowVectors, arrays_of, parts_of
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
        slices: Sequence[tf.IndexedSlices],
        contributes: tf.Tensor | None = None,
        keep_rows: bool = True,
        weight: tf.Tensor | None = None,
    ) -> list[tf.IndexedSlices]:
        """Sums sparse rows of several variables over all processes, in one call of the host.

        Gathering sends every process's rows to all and keeps the rows separate, so that an optimizer treats a row that
        occurs more than once as it does on one process. The dense form sends the whole variable about twice, for any
        number of rows.

        Args:
            slices: rows of each variable; an index may occur more than once.
            contributes: boolean scalar; false if this process has no samples, and so no rows.
            keep_rows: whether every occurrence of a row is kept. If not, and the dense shape is known, rows are summed
                if that sends fewer bytes. The same on all processes.
            weight: float64 scalar that this process's floating-point rows are multiplied by; with 0 this process has no
                rows. Replaces ``contributes``.

        Returns:
            The rows of all processes, in the order of their ranks, after `with_distinct_rows`; or every row of the
            dense sum.
        """
        if weight is not None and contributes is not None:
            raise ValueError(
                "all_reduce takes either weight or contributes; got both. Pass a weight of 0 if there are no samples."
            )
        given = [_as_tensors(each) for each in slices]
        values, indices = [each.values for each in given], [each.indices for each in given]
        share = contributes if weight is None else checked_weight(weight, values)
        if self._group.size == 1:
            own = values if weight is None else [weighted_in_graph(each, share) for each in values]
            return _slices(own, indices, given)
        if not given:
            return []
        vectors = RowVectors(given)
        heads = tf.stack([_rows_of_variable(None if keep_rows else each.dense_shape) for each in given])
        operands = [tf.constant(True) if share is None else share, vectors.counts, vectors.widths, heads]
        key = f"rows of {len(given)} {', '.join(sorted({each.dtype.name for each in values}))}"
        if tf.executing_eagerly():
            counts, *results = self._on_host(f"eager {key}", vectors.kinds, *operands, *vectors.vectors)
        else:
            site = call_site(key, self._group.members)
            counts, *results = host_call(
                lambda *arguments: self._on_host(site, vectors.kinds, *arguments),
                [*operands, *vectors.vectors],
                [tf.int64, *(vector.dtype for vector in vectors.vectors)],
                name="tfdist_slices",
            )
        for result in (counts, *results):
            result.set_shape([None])
        tensors = vectors.cut(results, counts)
        totals = _slices(tensors[: len(given)], tensors[len(given) :], given)
        return [with_distinct_rows(total) for total in totals]

    def _on_host(
        self,
        key: str,
        kinds: Kinds,
        share: tf.Tensor,
        counts: tf.Tensor,
        widths: tf.Tensor,
        heads: tf.Tensor,
        *vectors: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Gathers the rows of several variables, or sums them if that sends fewer bytes.

        Args:
            key: key of the call site.
            kinds: kinds of the vectors; see `tfdist.engine.row_vectors`.
            share: whether this process contributes, or its weight.
            counts: numbers of rows.
            widths: numbers of elements in a row.
            heads: numbers of rows of the whole variables; 0 for those that are gathered in any case.
            vectors: the vectors.

        Returns:
            The numbers of rows of all processes, and the vectors with these.
        """
        numbers = range(int(counts.shape[0]))
        arrays = arrays_of(
            kinds, [to_array(vector) for vector in vectors], *(each.numpy().tolist() for each in (counts, widths))
        )
        factor = float(share) if share.dtype == tf.float64 else None
        if not (bool(share) if factor is None else factor):
            arrays = [array[:0] for array in arrays]
        rows, places = arrays[: len(numbers)], arrays[len(numbers) :]
        dense = self._sent_densely(key, rows, places, heads.numpy().tolist())
        sparse = [number for number in numbers if number not in dense]
        sums = {
            number: self._post_sum(f"{key}: {number}", rows[number], places[number], factor, head)
            for number, head in dense.items()
        }
        gathered = self._gathered(
            key, [rows[number] for number in sparse], [places[number] for number in sparse], factor
        )
        parts = dict(zip([*sparse, *(len(numbers) + number for number in sparse)], gathered, strict=True))
        for number, (total, posted) in sums.items():
            self._group.wait(posted)
            parts[number], parts[len(numbers) + number] = [total], [np.arange(len(total), dtype=places[number].dtype)]
        totals = np.array([sum(map(len, parts[number])) for number in numbers], np.int64)
        ordered = [parts[number] for number in range(len(arrays))]
        return [tf.constant(totals), *(to_tensor(self._joined(each)) for each in parts_of(kinds, ordered))]

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0]
        room = self._group.take(sum(part.nbytes for part in parts)).view(parts[0].dtype)
        return np.concatenate(parts, out=room)

    def _sent_densely(
        self, key: str, rows: Sequence[np.ndarray], places: Sequence[np.ndarray], heads: Sequence[int]
    ) -> dict[int, int]:
        """Returns which variables' dense form has fewer bytes, and their rows; the same on all processes.

        The numbers of rows are known only at run time, so the processes first gather them.
        """
        if not any(heads):
            return {}
        own = np.array([[len(each) for each in rows]], np.int64)
        counts, _ = self._group.run(f"{key}: counts", operations.all_gather_rows(own))
        row_bytes = [each.itemsize * each.shape[1] for each in rows]
        return {
            number: heads[number]
            for number, (total, nbytes) in enumerate(zip(counts.sum(0).tolist(), row_bytes, strict=True))
            if heads[number] and total * (nbytes + places[number].itemsize) >= 2 * heads[number] * nbytes
        }

    def _gathered(
        self, key: str, rows: Sequence[np.ndarray], places: Sequence[np.ndarray], factor: float | None
    ) -> list[list[np.ndarray]]:
        """Gathers rows of variables and their indices, and returns the parts of each.

        Those of several variables are one message from each process, as a message takes longer than the data of small
        variables. Those of one variable, which may be large, are not copied into a message, nor out of it.
        """
        if not rows:
            return []
        if len(rows) == 1:
            posted = [
                self._group.post(f"{key}, {what}", operations.all_gather_rows(array), overlaps=False)
                for what, array in (("indices", places[0]), ("rows", self._weighted(rows[0], factor)))
            ]
            every_index, every_row = (self._group.wait(each)[0] for each in posted)
            return [[every_row], [every_index]]
        forms = ", ".join(
            f"rows of {each.shape[1]} {each.dtype} by {index.dtype}" for each, index in zip(rows, places, strict=True)
        )
        message = packed_rows.pack(rows, places, factor, self._group.take)
        every, sizes = self._group.run(key, operations.all_gather_rows(message), forms)
        messages = [part for part in np.split(every, np.cumsum(sizes)[:-1]) if len(part)]
        unpacked = [packed_rows.unpack(part, rows, places) for part in messages]
        return [list(parts) for parts in zip(*unpacked, strict=True)]

    def _post_sum(
        self, key: str, rows: np.ndarray, places: np.ndarray, factor: float | None, head: int
    ) -> tuple[np.ndarray, Pending]:
        """Posts the sum of a variable's rows in its dense shape; returns where it will be."""
        shape = (head, rows.shape[1])
        total = self._group.take(math.prod(shape) * rows.itemsize).view(rows.dtype).reshape(shape)
        total[...] = 0
        np.add.at(total, places, self._weighted(rows, factor))
        plan = operations.all_reduce(total.reshape(-1), self._group.choose(total.nbytes))
        return total, self._group.post(key, plan, overlaps=False)

    def _weighted(self, rows: np.ndarray, factor: float | None) -> np.ndarray:
        """Returns rows times a factor; as they are for None, or without rows."""
        if factor is None or not len(rows):
            return rows
        room = self._group.take(rows.nbytes).view(rows.dtype)
        return weighted(rows.reshape(-1), factor, room).reshape(rows.shape)


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


def _as_tensors(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Converts the components of slices, which may be lists, to tensors; the dense shape, if known, to int64."""
    shape = None if slices.dense_shape is None else tf.cast(slices.dense_shape, tf.int64)
    return tf.IndexedSlices(tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices), shape)


def _slices(
    values: Sequence[tf.Tensor], indices: Sequence[tf.Tensor], like: Sequence[tf.IndexedSlices]
) -> list[tf.IndexedSlices]:
    """Returns slices with the dense shapes of others."""
    return [
        tf.IndexedSlices(rows, places, each.dense_shape)
        for rows, places, each in zip(values, indices, like, strict=True)
    ]


def _rows_of_variable(dense_shape: tf.Tensor | None) -> tf.Tensor:
    """Returns the number of rows of a variable; 0 if its dense shape is unknown."""
    return tf.zeros([], tf.int64) if dense_shape is None else dense_shape[0]
