"""Sums of sparse rows over processes: gathered, or dense if that sends fewer bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfdist.engine import operations
from tfdist.engine.call_sites import call_site
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import host_call
from tfdist.engine.pending import Pending
from tfdist.engine.row_vectors import Layout, Parts, RowVectors
from tfdist.engine.weights import checked_weight, weighted, weighted_in_graph
from tfdist.tensors import HOST


@dataclass(frozen=True)
class _Site:
    """A call site of sums.

    Attributes:
        key: its key.
        is_eager: whether the process does nothing else meanwhile.
        layout: layout of its vectors.
        contents: names of its variables.
    """

    key: str
    is_eager: bool
    layout: Layout
    contents: str


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
        names: Sequence[str] = (),
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
            names: names of the variables, for messages.

        Returns:
            The rows of all processes, in the order of their ranks, after `with_distinct_rows`; or every row of the
            dense sum. Rows that are distinct on each process, because a graph has made them so, are distinct.
        """
        if weight is not None and contributes is not None:
            raise ValueError(
                "all_reduce takes either weight or contributes; got both. Pass a weight of 0 if there are no samples."
            )
        given = [_as_tensors(each) for each in slices]
        values = [each.values for each in given]
        share = contributes if weight is None else checked_weight(weight, values)
        if self._group.size == 1:
            own = values if weight is None else [weighted_in_graph(each, share) for each in values]
            return [
                tf.IndexedSlices(rows, each.indices, each.dense_shape) for rows, each in zip(own, given, strict=True)
            ]
        if not given:
            return []
        vectors = RowVectors(given)
        heads = tf.stack([_rows_of_variable(None if keep_rows else each.dense_shape) for each in given])
        operands = [tf.constant(True) if share is None else share, tf.stack([vectors.widths, heads]), *vectors.vectors]
        if tf.executing_eagerly():
            # With the forms, so that processes with others wait for another key, and later calls work.
            forms = (f"{s.values.dtype.name} {s.values.shape[1:]} by {s.indices.dtype.name}" for s in given)
            site = _Site(f"eager rows of {', '.join(forms)}", True, vectors.layout, ", ".join(names))
        else:
            key = f"rows of {len(given)} {', '.join(sorted({each.dtype.name for each in values}))}"
            site = _Site(call_site(key, self._group.members), False, vectors.layout, ", ".join(names))
        specs = [tf.TensorSpec([None], vector.dtype) for vector in vectors.vectors]
        results = host_call(functools.partial(self._on_host, site), operands, specs, name="tfdist_slices")
        totals = zip(vectors.cut(results), given, strict=True)
        return [with_distinct_rows(total, _are_made_distinct(each.indices)) for total, each in totals]

    def _on_host(self, site: _Site, share: np.ndarray, sizes: np.ndarray, *vectors: np.ndarray) -> list[np.ndarray]:
        """Gathers the rows of several variables, or sums them if that sends fewer bytes.

        Args:
            site: the call site.
            share: whether this process contributes, or its weight.
            sizes: numbers of elements in a row of each variable; and numbers of rows of the whole variables, 0 for
                those that are gathered in any case.
            vectors: the vectors of this process.

        Returns:
            The vectors of all processes.
        """
        layout, (widths, heads) = site.layout, sizes.tolist()
        arrays = list(vectors)
        dtypes = [array.dtype for array in arrays]
        factor = float(share) if share.dtype == np.float64 else None
        if not (bool(share) if factor is None else factor):
            arrays = layout.pack([Parts() for _ in widths], dtypes, self._group.take)
        elif factor is not None:
            arrays[: len(layout.rows)] = [self._weighted(array, factor) for array in arrays[: len(layout.rows)]]
        dense = {}
        if any(heads):
            own = layout.unpack(arrays, [[len(array)] for array in arrays], widths)
            dense = self._posted_sums(site.key, own, widths, heads)
            if dense:
                own = [Parts() if variable in dense else parts for variable, parts in enumerate(own)]
                arrays = layout.pack(own, dtypes, self._group.take)
        parts = [Parts() for _ in widths]
        if len(dense) < len(widths):
            parts = layout.unpack(*self._gathered(site, widths, arrays), widths)
        for variable, (total, posted) in dense.items():
            self._group.wait(posted)
            parts[variable] = Parts([total], [np.arange(heads[variable])])
        return layout.pack(parts, dtypes, self._group.take)

    def _gathered(
        self, site: _Site, widths: Sequence[int], arrays: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[list[int]]]:
        """Gathers vectors, all at once; returns those of all processes, and the number of elements of each process."""
        forms = [f"rows of {', '.join(str(widths[variable]) for variable in kind)}" for kind in site.layout.rows]
        forms += [f"indices of {len(kind)}" for kind in site.layout.indices]
        collectives = [
            (f"{site.key}, {place}", operations.all_gather_rows(array), f"{form} {array.dtype}")
            for place, (form, array) in enumerate(zip(forms, arrays, strict=True))
        ]
        gathered = []
        if site.is_eager:  # a process that calls something else is known before more than one is under way
            gathered.append(self._group.run(*collectives.pop(0), contents=site.contents))
        posted = [self._group.post(*each, overlaps=False, contents=site.contents) for each in collectives]
        gathered += [self._group.wait(each) for each in posted]
        return [every for every, _ in gathered], [sizes.tolist() for _, sizes in gathered]

    def _posted_sums(
        self, key: str, own: Sequence[Parts], widths: Sequence[int], heads: Sequence[int]
    ) -> dict[int, tuple[np.ndarray, Pending]]:
        """Posts the sums of those variables whose dense form has fewer bytes, which are the same on all processes.

        The numbers of rows are known only at run time, so the processes first gather them.

        Returns:
            The elements of each sum, when it is over.
        """
        counts, _ = self._group.run(
            f"{key}: counts", operations.all_gather_rows(np.array([[each.count for each in own]], np.int64))
        )
        sums = {}
        for variable, (total, each) in enumerate(zip(counts.sum(0).tolist(), own, strict=True)):
            (rows,), (indices,) = each.rows, each.indices
            row_bytes = widths[variable] * rows.itemsize
            if heads[variable] and total * (row_bytes + indices.itemsize) >= 2 * heads[variable] * row_bytes:
                dense = self._group.take(heads[variable] * row_bytes).view(rows.dtype)
                dense[:] = 0
                shapes = (heads[variable], widths[variable]), (len(indices), widths[variable])
                np.add.at(dense.reshape(shapes[0]), indices, rows.reshape(shapes[1]))
                plan = operations.all_reduce(dense, self._group.choose(dense.nbytes))
                sums[variable] = dense, self._group.post(f"{key}: {variable}", plan, overlaps=False)
        return sums

    def _weighted(self, rows: np.ndarray, factor: float) -> np.ndarray:
        return weighted(rows, factor, self._group.take(rows.nbytes).view(rows.dtype))


def with_distinct_rows(slices: tf.IndexedSlices, in_any_case: bool = False) -> tf.IndexedSlices:
    """Adds up rows of the same index, on the host, if TensorFlow has GPUs; otherwise returns the slices unchanged.

    A GPU adds rows of the same index in an order that differs from run to run and between ranks, so that the ranks'
    weights would drift apart. Because of the summation, optimizers that square gradients square the sum of a row's
    occurrences.

    Args:
        slices: the rows.
        in_any_case: whether they are added up without GPUs, too.
    """
    if not in_any_case and not tf.config.get_visible_devices("GPU"):
        return slices
    with tf.device(HOST):
        indices, places = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _are_made_distinct(indices: tf.Tensor) -> bool:
    """Returns whether a graph has indices of `tf.unique`, as in gradients of `tf.nn.embedding_lookup_sparse`.

    On one process such rows are distinct for the whole batch. Of eager tensors it is not known.
    """
    while tf.is_symbolic_tensor(indices) and indices.op.type in ("Reshape", "Identity", "Cast"):
        indices = indices.op.inputs[0]
    return tf.is_symbolic_tensor(indices) and indices.op.type in ("Unique", "UniqueV2")


def _as_tensors(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Converts the components of slices, which may be lists, to tensors; the dense shape, if known, to int64.

    Indices of fewer than 32 bits, which most of TensorFlow's operations do not take, become int32.
    """
    shape = None if slices.dense_shape is None else tf.cast(slices.dense_shape, tf.int64)
    indices = tf.convert_to_tensor(slices.indices)
    if indices.dtype.size < 4:
        indices = tf.cast(indices, tf.int32)
    return tf.IndexedSlices(tf.convert_to_tensor(slices.values), indices, shape)


def _rows_of_variable(dense_shape: tf.Tensor | None) -> tf.Tensor:
    """Returns the number of rows of a variable; 0 if its dense shape is unknown."""
    return tf.zeros([], tf.int64) if dense_shape is None else dense_shape[0]
