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

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import algorithms
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.cost import Calibration
from tfdist.engine import buckets, joining
from tfdist.engine.buckets import Bucket
from tfdist.engine.engine import Engine, describe
from tfdist.engine.pending import Pending
from tfdist.engine.tensors import call_site, to_tensor


class _Sum:
    """What a bucket is asked for: how it is combined, what it holds in words, and the tensors in it."""

    def __init__(self, combine: np.ufunc, contents: str, tensors: Sequence[tf.Tensor]) -> None:
        self.combine = combine
        self.contents = contents
        self.tensors = tensors
        self.verb = "sum" if combine is np.add else combine.__name__


class Bridge:
    """All-reduces of TensorFlow tensors; `tfdist.engine.exchange` has the other collectives.

    Args:
        engine: moves the bytes; None in a world of one, where every collective is its own result.
        algorithm: the name of the all-reduce.
        calibration: by which ``"auto"`` chooses.
        members: the ranks that take part; None if all do.
    """

    def __init__(
        self,
        engine: Engine | None,
        algorithm: str = "ring",
        calibration: Calibration | None = None,
        members: tuple[int, ...] | None = None,
    ) -> None:
        self._alone = engine is None
        self._algorithm = algorithm
        self._all_reduce = algorithms.named(algorithm, calibration)
        self._members = members
        self._group = f" in group {list(members)}" if members is not None else ""
        self._engine: Engine = engine  # type: ignore[assignment]
        self._posted: dict[int, tuple[Pending, list[np.ndarray]]] = {}
        self._handles = itertools.count()
        self._lock = threading.Lock()

    @tf.autograph.experimental.do_not_convert
    def all_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        contributes: tf.Tensor | None = None,
        combine: np.ufunc = np.add,
        names: Sequence[str] | None = None,
    ) -> list[tf.Tensor]:
        """Sums each tensor over all processes, or combines them otherwise.

        Args:
            tensors: dense, of any numeric dtype; those with one position have one shape on all processes. In the
                order in which they become available, for the earliest start.
            contributes: boolean scalar, false where a process has no samples: what a mean over none of them made
                infinite or undefined then counts as zero.
            combine: a commutative and associative NumPy ufunc of two arguments.
            names: of the tensors, for messages.

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
        names = names or [f"{place + 1} of {len(tensors)}" for place in range(len(tensors))]
        plan = _plan(tensors)
        order = [member for bucket in plan for member in bucket.members]
        jobs = [
            _Sum(combine, ", ".join(names[member] for member in bucket.members), [tensors[m] for m in bucket.members])
            for bucket in plan
        ]
        if tf.executing_eagerly():
            outputs = self._sum_eagerly(jobs, bool(contributes))
        else:
            outputs = self._sum_in_graph(jobs, contributes)
        results = dict(zip(order, outputs, strict=True))
        return [results[place] for place in range(len(tensors))]

    def _sum_eagerly(self, jobs: list[_Sum], contributes: bool) -> list[tf.Tensor]:
        posted = []
        for place, job in enumerate(jobs):
            arrays = [np.asarray(tensor) for tensor in job.tensors]
            key = f"eager {job.verb} #{place} of {describe(arrays)}{self._group}"
            posted.append(self._post_sum(key, job, arrays, contributes, blocking=True))
        return [output for handle in posted for output in self._collect(handle, blocking=True)]

    def _sum_in_graph(self, jobs: list[_Sum], contributes: tf.Tensor) -> list[tf.Tensor]:
        """Posts every bucket but the last; one last host call posts that one and waits for all."""
        handles = []
        for job in jobs[:-1]:
            post = self._poster(self._site(job), job)
            handles.append(tf.py_function(post, [contributes, *job.tensors], tf.int64, name="tfdist_post"))
        last = jobs[-1]
        key = self._site(last)
        expected = [tensor for job in jobs for tensor in job.tensors]

        def finish(contributes: tf.Tensor, *inputs: tf.Tensor) -> list[tf.Tensor]:
            arrays = [np.asarray(tensor) for tensor in inputs[: len(last.tensors)]]
            final = self._post_sum(key, last, arrays, bool(contributes), overlaps=False)
            return [output for handle in (*inputs[len(last.tensors) :], final) for output in self._collect(handle)]

        outputs = tf.py_function(
            finish, [contributes, *last.tensors, *handles], [tensor.dtype for tensor in expected], name="tfdist_finish"
        )
        for output, tensor in zip(outputs, expected, strict=True):
            output.set_shape(tensor.shape)
        return outputs

    def _site(self, job: _Sum) -> str:
        return call_site(f"{job.verb} of {len(job.tensors)} {job.tensors[0].dtype.name}{self._group}")

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
        if slices.dense_shape is None:
            raise ValueError("all_reduce_slices needs the dense shape of the IndexedSlices")
        slices, dense_shape = _as_tensors(slices)
        key = f"slices of {slices.values.dtype.name}{self._group}"
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

    # On the host.

    def _poster(self, key: str, job: _Sum) -> Callable[..., np.int64]:
        def post(contributes: tf.Tensor, *tensors: tf.Tensor) -> np.int64:
            return np.int64(self._post_sum(key, job, [np.asarray(tensor) for tensor in tensors], bool(contributes)))

        return post

    def _post_sum(
        self,
        key: str,
        job: _Sum,
        arrays: Sequence[np.ndarray],
        contributes: bool,
        blocking: bool = False,
        overlaps: bool = True,
    ) -> int:
        ready = time.monotonic()
        if not contributes:
            arrays = [_finite_or_zero(array) for array in arrays]
        if len(arrays) == 1:
            (array,) = arrays  # read where it is; the sum goes into a buffer of its own
            buffer = self._engine.communicator.take(array.nbytes).view(array.dtype)
            views = [buffer.reshape(array.shape)]
            plan = self._all_reduce(buffer, job.combine, source=array.reshape(-1))
        else:
            buffer, views = self._packed(arrays)
            plan = self._all_reduce(buffer, job.combine)
        handle = next(self._handles)
        pending = self._engine.post(
            key,
            plan,
            describe(arrays),
            blocking=blocking,
            overlaps=overlaps,
            members=self._members,
            contents=job.contents,
            stand_in=joining.sum_of(buffer.size, buffer.dtype, self._algorithm) if job.combine is np.add else None,
            ready=ready,
        )
        with self._lock:
            self._posted[handle] = (pending, views)
        return handle

    def _packed(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """One flat array that holds all of these, and the view of each in it."""
        starts, total = buckets.offsets([array.nbytes for array in arrays])
        buffer = self._engine.communicator.take(total)
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

    def _collect(self, handle: tf.Tensor | int, blocking: bool = False) -> list[tf.Tensor]:
        with self._lock:
            pending, views = self._posted.pop(int(handle))
        self._engine.wait(pending, blocking)
        return [to_tensor(view) for view in views]

    def _host_slices(
        self, key: str, contributes: tf.Tensor, values: tf.Tensor, indices: tf.Tensor, dense_shape: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        rows, places = np.asarray(values), np.asarray(indices)
        shape = tuple(int(size) for size in np.asarray(dense_shape))
        if not bool(contributes):
            rows, places = rows[:0], places[:0]
        run = functools.partial(self._engine.run, members=self._members)
        counts, _ = run(f"{key}: count", all_gather_rows(np.array([len(rows)], np.int64)))
        row_bytes = int(np.prod(shape[1:])) * rows.dtype.itemsize
        if int(counts.sum()) * (row_bytes + places.itemsize) < 2 * shape[0] * row_bytes:
            gathered, _ = run(f"{key}: rows", all_gather_rows(np.ascontiguousarray(rows)))
            all_places, _ = run(f"{key}: indices", all_gather_rows(np.ascontiguousarray(places)))
            return to_tensor(gathered), to_tensor(all_places)
        dense = self._engine.communicator.take(shape[0] * row_bytes).view(rows.dtype).reshape(shape)
        dense[...] = 0
        np.add.at(dense, places, rows)
        run(f"{key}: dense", self._all_reduce(dense.reshape(-1)))
        return to_tensor(dense), tf.range(shape[0], dtype=indices.dtype)


def _as_tensors(slices: tf.IndexedSlices) -> tuple[tf.IndexedSlices, tf.Tensor]:
    """The slices with components that users may have given as lists, and the dense shape as int64."""
    shape = tf.cast(slices.dense_shape, tf.int64)
    values, indices = tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)
    return tf.IndexedSlices(values, indices, shape), shape


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
