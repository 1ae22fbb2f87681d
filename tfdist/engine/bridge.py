"""The way of a tensor out of TensorFlow, through the engine, and back; in graphs and eagerly.

Three rules, each of which was seen to matter:

- The input is never written: a constant, a variable's buffer or a gradient that two variables share may lie
  behind it. It is read where it lies; the sum goes into a buffer from a pool.
- The result is handed to TensorFlow where it lies (DLPack), and its memory returns to the pool when TensorFlow
  has dropped it.
- TensorFlow runs the host calls of a graph in the order in which they were traced. So all posts are traced
  before the first wait, and bytes move while the graph goes on computing.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import ring
from tfdist.collectives.algorithms import AllReduce
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.broadcast import broadcast
from tfdist.comm.buffers import BufferPool
from tfdist.engine import buckets
from tfdist.engine.buckets import Bucket
from tfdist.engine.engine import Engine, Pending, describe

_DLPACK_KINDS = "fiuc"


class Bridge:
    """Collectives on TensorFlow tensors.

    Args:
        engine: moves the bytes; None in a world of one, where every collective is its own result.
        all_reduce: the algorithm that sums.
    """

    def __init__(self, engine: Engine | None, all_reduce: AllReduce = ring.all_reduce) -> None:
        self._alone = engine is None
        self._all_reduce = all_reduce
        self._engine: Engine = engine  # type: ignore[assignment]
        self._pool = BufferPool()
        self._posted: dict[int, tuple[Pending, list[np.ndarray]]] = {}
        self._handles = itertools.count()
        self._lock = threading.Lock()

    @tf.autograph.experimental.do_not_convert
    def all_reduce_sum(self, tensors: Sequence[tf.Tensor], contributes: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Sums each tensor over all processes.

        Args:
            tensors: dense, of any numeric dtype; those with one position have one shape on all processes. In the
                order in which they become available, for the earliest start.
            contributes: boolean scalar, false where a process has no samples: what a mean over none of them made
                infinite or undefined then counts as zero.

        Returns:
            The sums, equal to the last bit on all processes.
        """
        if not tensors:
            return []
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if self._alone:
            return tensors
        if contributes is None:
            contributes = tf.constant(True)
        plan = _plan(tensors)
        order = [member for bucket in plan for member in bucket.members]
        if tf.executing_eagerly():
            outputs = self._sum_eagerly(plan, tensors, bool(contributes))
        else:
            outputs = self._sum_in_graph(plan, tensors, contributes)
        results = dict(zip(order, outputs, strict=True))
        return [results[place] for place in range(len(tensors))]

    def _sum_eagerly(self, plan: list[Bucket], tensors: Sequence[tf.Tensor], contributes: bool) -> list[tf.Tensor]:
        posted = []
        for place, bucket in enumerate(plan):
            arrays = [np.asarray(tensors[member]) for member in bucket.members]
            key = f"eager sum #{place} of {describe(arrays)}"
            posted.append(self._post_sum(key, arrays, contributes, blocking=True))
        return [output for handle in posted for output in self._collect(handle)]

    def _sum_in_graph(
        self, plan: list[Bucket], tensors: Sequence[tf.Tensor], contributes: tf.Tensor
    ) -> list[tf.Tensor]:
        """Posts every bucket but the last; one last host call posts that one and waits for all."""
        handles = []
        for bucket in plan[:-1]:
            members = [tensors[member] for member in bucket.members]
            post = self._poster(call_site(f"sum of {len(members)} {bucket.dtype}"))
            handles.append(tf.py_function(post, [contributes, *members], tf.int64, name="tfdist_post"))
        last = [tensors[member] for member in plan[-1].members]
        key = call_site(f"sum of {len(last)} {plan[-1].dtype}")
        expected = [tensors[member] for bucket in plan for member in bucket.members]

        def finish(contributes: tf.Tensor, *inputs: tf.Tensor) -> list[tf.Tensor]:
            arrays = [np.asarray(tensor) for tensor in inputs[: len(last)]]
            final = self._post_sum(key, arrays, bool(contributes), overlaps=False)
            return [output for handle in (*inputs[len(last) :], final) for output in self._collect(handle)]

        outputs = tf.py_function(
            finish, [contributes, *last, *handles], [tensor.dtype for tensor in expected], name="tfdist_finish"
        )
        for output, tensor in zip(outputs, expected, strict=True):
            output.set_shape(tensor.shape)
        return outputs

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, tensor: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """Concatenates a tensor over all processes, in the order of the ranks.

        Args:
            tensor: dense and at least one-dimensional; all dimensions but ``axis`` are the same on all processes.
            axis: along which it is concatenated.

        Returns:
            The concatenation, on every process.
        """
        tensor = tf.convert_to_tensor(tensor)
        if tensor.shape.rank == 0:
            raise ValueError("all_gather needs tensors of at least one dimension; got a scalar")
        if self._alone:
            return tensor
        axis = axis % tensor.shape.rank
        order = [axis, *(other for other in range(tensor.shape.rank) if other != axis)]
        rows = tf.transpose(tensor, order) if axis else tensor
        if tf.executing_eagerly():
            array = np.ascontiguousarray(rows)
            key = f"eager gather of {array.dtype} (*, {', '.join(map(str, array.shape[1:]))})"
            gathered = self._host_gather(key, array)
        else:
            key = call_site(f"gather of {rows.dtype.name}")
            gathered = tf.py_function(
                lambda value: self._host_gather(key, np.ascontiguousarray(value)),
                [rows],
                rows.dtype,
                name="tfdist_gather",
            )
            gathered.set_shape([None, *rows.shape[1:]])
        return tf.transpose(gathered, np.argsort(order)) if axis else gathered

    @tf.autograph.experimental.do_not_convert
    def all_reduce_slices(self, slices: tf.IndexedSlices, contributes: tf.Tensor | None = None) -> tf.IndexedSlices:
        """Sums sparse rows over all processes, in the form that sends fewer bytes.

        Gathering sends every process's rows to all; the dense form sends the whole variable about twice. How many
        rows there are is known only when they are, so all processes first tell each other and then choose alike.

        Args:
            slices: rows of a variable; an index may occur more than once.
            contributes: as in `all_reduce_sum`.

        Returns:
            The rows of all processes; or, where that is cheaper, every row of the sum.
        """
        if self._alone:
            return slices
        dense_shape = slices.dense_shape
        if dense_shape is None:
            raise ValueError("all_reduce_slices needs the dense shape of the IndexedSlices")
        key = f"slices of {slices.values.dtype.name}"
        if contributes is None:
            contributes = tf.constant(True)
        operands = [contributes, slices.values, slices.indices, dense_shape]
        if tf.executing_eagerly():
            values, indices = self._host_slices(f"eager {key}", *operands)
        else:
            site = call_site(key)
            values, indices = tf.py_function(
                lambda *arguments: self._host_slices(site, *arguments),
                operands,
                [slices.values.dtype, slices.indices.dtype],
                name="tfdist_slices",
            )
            values.set_shape([None, *slices.values.shape[1:]])
            indices.set_shape([None])
        return tf.IndexedSlices(values, indices, dense_shape)

    def broadcast(self, tensor: tf.Tensor, key: str, signature: str, root: int = 0) -> tf.Tensor:
        """The root's tensor, on every process; eagerly only.

        Args:
            tensor: of one shape and dtype on all processes.
            key: names this one broadcast.
            signature: compared over the processes before anything is sent.
            root: the rank whose tensor counts.
        """
        if self._alone:
            return tensor
        array = np.asarray(tensor)
        value = np.array(array)
        self._engine.run(key, broadcast(value.reshape(-1).view(np.uint8), root), signature)
        return _to_tensor(value)

    # On the host.

    def _poster(self, key: str) -> Callable[..., np.int64]:
        def post(contributes: tf.Tensor, *tensors: tf.Tensor) -> np.int64:
            return np.int64(self._post_sum(key, [np.asarray(tensor) for tensor in tensors], bool(contributes)))

        return post

    def _post_sum(
        self,
        key: str,
        arrays: Sequence[np.ndarray],
        contributes: bool,
        blocking: bool = False,
        overlaps: bool = True,
    ) -> int:
        if not contributes:
            arrays = [_finite_or_zero(array) for array in arrays]
        if len(arrays) == 1:
            (array,) = arrays  # read where it is; the sum goes into a buffer of its own
            views = [self._pool.take(array.nbytes).view(array.dtype).reshape(array.shape)]
            plan = self._all_reduce(views[0].reshape(-1), source=array.reshape(-1))
        else:
            buffer, views = self._packed(arrays)
            plan = self._all_reduce(buffer)
        handle = next(self._handles)
        pending = self._engine.post(key, plan, blocking=blocking, overlaps=overlaps)
        with self._lock:
            self._posted[handle] = (pending, views)
        return handle

    def _packed(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """One flat array that holds all of these, and the view of each in it."""
        starts, total = buckets.offsets([array.nbytes for array in arrays])
        buffer = self._pool.take(total)
        views = []
        end = 0
        for array, start in zip(arrays, starts, strict=True):
            buffer[end:start] = 0
            end = start + array.nbytes
            view = buffer[start:end].view(array.dtype).reshape(array.shape)
            view[...] = array
            views.append(view)
        buffer[end:] = 0
        return buffer.view(arrays[0].dtype), views

    def _collect(self, handle: tf.Tensor | int) -> list[tf.Tensor]:
        with self._lock:
            pending, views = self._posted.pop(int(handle))
        self._engine.wait(pending)
        return [_to_tensor(view) for view in views]

    def _host_gather(self, key: str, rows: np.ndarray) -> tf.Tensor:
        gathered, _ = self._engine.run(key, all_gather_rows(rows))
        return _to_tensor(gathered)

    def _host_slices(
        self, key: str, contributes: tf.Tensor, values: tf.Tensor, indices: tf.Tensor, dense_shape: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        rows, places = np.asarray(values), np.asarray(indices)
        shape = tuple(int(size) for size in np.asarray(dense_shape))
        if not bool(contributes):
            rows, places = rows[:0], places[:0]
        counts, _ = self._engine.run(f"{key}: count", all_gather_rows(np.array([len(rows)], np.int64)))
        row_bytes = int(np.prod(shape[1:])) * rows.dtype.itemsize
        if int(counts.sum()) * (row_bytes + places.itemsize) < 2 * shape[0] * row_bytes:
            gathered, _ = self._engine.run(f"{key}: rows", all_gather_rows(np.ascontiguousarray(rows)))
            all_places, _ = self._engine.run(f"{key}: indices", all_gather_rows(np.ascontiguousarray(places)))
            return _to_tensor(gathered), _to_tensor(all_places)
        dense = self._pool.take(shape[0] * row_bytes).view(rows.dtype).reshape(shape)
        dense[...] = 0
        np.add.at(dense, places, rows)
        self._engine.run(f"{key}: dense", self._all_reduce(dense.reshape(-1)))
        return _to_tensor(dense), tf.range(shape[0], dtype=indices.dtype)


def _finite_or_zero(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind in "biu":
        return array
    return np.where(np.isfinite(array), array, np.zeros((), array.dtype))


def _plan(tensors: Sequence[tf.Tensor]) -> list[Bucket]:
    """Buckets for tensors whose size is known when they are traced; the others go alone."""
    sizes = []
    for tensor in tensors:
        elements = tensor.shape.num_elements()
        sizes.append(buckets.BUCKET_BYTES if elements is None else elements * tensor.dtype.size)
    return buckets.plan(sizes, [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in tensors])


def _to_tensor(array: np.ndarray) -> tf.Tensor:
    """The array as a tensor that stands on the same memory, where DLPack allows it."""
    if array.size == 0 or array.ctypes.data % 64:
        return tf.convert_to_tensor(array)
    if array.dtype.kind in _DLPACK_KINDS and array.dtype.isbuiltin == 1:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    if array.dtype.itemsize == 2 and array.dtype.kind != "b":
        bits = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
        return tf.bitcast(bits, tf.as_dtype(array.dtype))
    return tf.convert_to_tensor(array)


def call_site(kind: str) -> str:
    """Names a place in the graph under construction: the same on every process, and after tracing again.

    The name is the path of function graphs, each with its place among its namesakes, and the place among the
    collectives of this kind in the innermost. It holds no shapes: a process whose last batch is smaller may have
    traced again with other ones.
    """
    graph = tf.compat.v1.get_default_graph()
    place = _count(graph, kind)
    path = []
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        name = re.sub(r"_+\d+$", "", graph.name)
        path.append(f"{name}#{_place_among_namesakes(graph, outer, name)}" if hasattr(outer, "outer_graph") else name)
        graph = outer
    return f"{'/'.join(reversed(path))}: {kind} #{place}"


def _count(graph: Any, kind: str) -> int:
    if not hasattr(graph, "_tfdist_sites"):
        graph._tfdist_sites = {}
    sites: dict[str, int] = graph._tfdist_sites
    sites[kind] = sites.get(kind, -1) + 1
    return sites[kind]


def _place_among_namesakes(graph: Any, outer: Any, name: str) -> int:
    if not hasattr(graph, "_tfdist_place"):
        graph._tfdist_place = _count(outer, f"graph {name}")
    return graph._tfdist_place
