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
from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.cost import Calibration
from tfdist.compression import compressor
from tfdist.compression.compressor import Compressed
from tfdist.engine import buckets, joining
from tfdist.engine.buckets import Bucket
from tfdist.engine.engine import Engine, describe
from tfdist.engine.means import Mean
from tfdist.engine.pending import Pending
from tfdist.engine.tensors import call_site, to_tensor
from tfdist.engine.weights import weighted


class _Sum:
    """What a bucket is asked for.

    Attributes:
        combine: how its members are combined.
        members: their places among all tensors.
        contents: what they are called.
        dtype: of all of them.
        shapes: dtypes and shapes, as far as they are known, in words.
        verb: what is done to them, in a word.
        mean: whether the sum is divided by the number of processes.
        compressed: how its members are compressed; empty where they are not.
    """

    def __init__(
        self,
        combine: np.ufunc,
        bucket: Bucket,
        tensors: Sequence[tf.Tensor],
        names: Sequence[str],
        compressed: Sequence[Compressed | None],
        verb: str,
        mean: bool,
    ) -> None:
        self.combine = combine
        self.mean = mean
        self.compressed = [how for how in (compressed[member] for member in bucket.members) if how is not None]
        self.members = bucket.members
        self.contents = ", ".join(names[member] for member in bucket.members)
        self._tensors = [tensors[member] for member in bucket.members]
        self.dtype = self._tensors[0].dtype
        self.shapes = ", ".join(f"{tensor.dtype.name} {tensor.shape}" for tensor in self._tensors)
        if self.compressed:
            self.shapes += f" by {', '.join(repr(how.schedule) for how in self.compressed)}"
        self.verb = f"compressed {verb}" if self.compressed else verb

    def packed(self) -> tf.Tensor:
        """All members as one tensor; put together by TensorFlow, where they are, and not at all if there is one."""
        if len(self._tensors) == 1:
            return self._tensors[0]
        return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in self._tensors], 0)

    def unpacked(self, total: tf.Tensor) -> list[tf.Tensor]:
        """The members' parts of a tensor like `packed`."""
        if len(self._tensors) == 1:
            total.set_shape(self._tensors[0].shape)
            return [total]
        sizes = [tensor.shape.num_elements() for tensor in self._tensors]
        total.set_shape([sum(sizes)])
        pairs = zip(tf.split(total, sizes), self._tensors, strict=True)
        return [part if tensor.shape.rank == 1 else tf.reshape(part, tensor.shape) for part, tensor in pairs]


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
        algorithms.check(algorithm, group=members is not None)
        self._algorithm = algorithm
        self._calibration = calibration
        self._members = members
        self._group = f" in group {list(members)}" if members is not None else ""
        self._engine: Engine = engine  # type: ignore[assignment]
        self._posted: dict[int, tuple[Pending, Callable[[], np.ndarray]]] = {}
        self._handles = itertools.count()
        self._lock = threading.Lock()

    @tf.autograph.experimental.do_not_convert
    def all_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        combine: np.ufunc = np.add,
        names: Sequence[str] | None = None,
        compressed: Sequence[Compressed | None] | None = None,
        verb: str | None = None,
        mean: bool = False,
        weight: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """Sums each tensor over all processes, or combines them otherwise.

        Args:
            tensors: dense, of any numeric dtype; those with one position have one shape on all processes. In the
                order in which they become available, for the earliest start.
            combine: a commutative and associative NumPy ufunc of two arguments.
            names: of the tensors, for messages.
            compressed: how each of the tensors is compressed; None where it is not.
            verb: what it is for, in a word that must be the same on all processes; by default after ``combine``.
            mean: whether sums are divided by the number of processes (of integers, rounded towards zero). A mean does
                not overflow where it is within the range of its dtype; not of compressed tensors.
            weight: float64 scalar that this process's tensors, of floating point, are multiplied by on their way; where
                it is 0 they count as zero, whatever they hold. Not with ``mean``.

        Returns:
            The sums, equal to the last bit on all processes.
        """
        if not tensors:
            return []
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if weight is not None and mean:
            raise ValueError("all_reduce takes no weight for a mean, in which all processes count alike")
        weight = None if weight is None else _weight(weight, tensors)
        if self._alone:
            if weight is not None:
                tensors = [_weighted_alone(tensor, weight) for tensor in tensors]
            return [
                _alone(tensor, how) for tensor, how in zip(tensors, compressed or [None] * len(tensors), strict=True)
            ]
        names = names or [f"{place + 1} of {len(tensors)}" for place in range(len(tensors))]
        compressed = compressed or [None] * len(tensors)
        verb = verb or ("mean" if mean else "sum" if combine is np.add else combine.__name__)
        plan = _plan(tensors, compressed)
        jobs = [_Sum(combine, bucket, tensors, names, compressed, verb, mean) for bucket in plan]
        totals = self._sum_eagerly(jobs, weight) if tf.executing_eagerly() else self._sum_in_graph(jobs, weight)
        results: dict[int, tf.Tensor] = {}
        for job, total in zip(jobs, totals, strict=True):
            results.update(zip(job.members, job.unpacked(total), strict=True))
        return [results[place] for place in range(len(tensors))]

    def _sum_eagerly(self, jobs: list[_Sum], weight: tf.Tensor | None) -> list[tf.Tensor]:
        posted = []
        for place, job in enumerate(jobs):
            key = f"eager {job.verb} #{place} of {job.shapes}{self._group}"
            posted.append(self._post_sum(key, job, job.packed(), weight, blocking=True))
        return [self._collect(handle, blocking=True) for handle in posted]

    def _sum_in_graph(self, jobs: list[_Sum], weight: tf.Tensor | None) -> list[tf.Tensor]:
        """Posts every bucket but the last; one last host call posts that one and waits for all."""
        weights = [] if weight is None else [weight]
        handles = []
        for job in jobs[:-1]:
            post = self._poster(self._site(job), job)
            handles.append(tf.py_function(post, [job.packed(), *weights], tf.int64, name="tfdist_post"))
        finish = self._finisher(self._site(jobs[-1]), jobs[-1], len(handles))
        dtypes = [job.dtype for job in jobs]
        return tf.py_function(finish, [jobs[-1].packed(), *handles, *weights], dtypes, name="tfdist_finish")

    def _poster(self, key: str, job: _Sum) -> Callable[..., np.int64]:
        def post(packed: tf.Tensor, weight: tf.Tensor | None = None) -> np.int64:
            return np.int64(self._post_sum(key, job, packed, weight))

        return post

    def _finisher(self, key: str, last: _Sum, posted: int) -> Callable[..., list[tf.Tensor]]:
        def finish(packed: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
            weight = rest[posted] if len(rest) > posted else None
            final = self._post_sum(key, last, packed, weight, overlaps=False)
            return [self._collect(handle) for handle in (*map(int, rest[:posted]), final)]

        return finish

    def _site(self, job: _Sum) -> str:
        return call_site(f"{job.verb} of {len(job.members)} {job.dtype.name}{self._group}")

    @tf.autograph.experimental.do_not_convert
    def all_reduce_slices(
        self,
        slices: tf.IndexedSlices,
        contributes: tf.Tensor | None = None,
        keep_rows: bool = True,
        weight: tf.Tensor | None = None,
    ) -> tf.IndexedSlices:
        """Sums sparse rows over all processes.

        Gathering sends every process's rows to all, and keeps them apart: what an optimizer makes of a row that occurs
        more than once is then what it makes of it on one process. The dense form sends the whole variable about twice,
        whatever the number of rows.

        Args:
            slices: rows of a variable; an index may occur more than once.
            contributes: boolean scalar, false where a process has no samples, and so no rows.
            keep_rows: whether every occurrence of a row is kept. If not, rows are summed where that sends fewer bytes;
                as long as the dense shape is known. The same on all processes.
            weight: as in `all_reduce`, of rows of floating point; where it is 0 this process has no rows. Instead of
                ``contributes``.

        Returns:
            The rows of all processes, in the order of their ranks; or every row of the sum.
        """
        slices, dense_shape = _as_tensors(slices)
        if weight is not None and contributes is not None:
            raise ValueError("a weight stands instead of contributes: 0 where a process has no samples")
        share = contributes if weight is None else _weight(weight, [slices.values])
        if self._alone:
            values = slices.values if weight is None else _weighted_alone(slices.values, share)
            return tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        key = f"slices of {slices.values.dtype.name}{self._group}"
        operands = [tf.constant(True) if share is None else share, slices.values, slices.indices]
        if not keep_rows and dense_shape is not None:
            operands.append(dense_shape)
            key += ", or their sum"
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

    def _post_sum(
        self,
        key: str,
        job: _Sum,
        packed: tf.Tensor,
        weight: tf.Tensor | None = None,
        blocking: bool = False,
        overlaps: bool = True,
    ) -> int:
        ready = time.monotonic()
        array = np.asarray(packed)  # read where it is; the sum goes into a buffer of its own
        shape = array.shape
        mean = Mean(array, self._size) if job.mean else None
        vector, stand_in = mean.summed if mean else array.reshape(-1), None
        buffer = self._scratch(vector)
        source: np.ndarray | None = vector
        if weight is not None and float(weight) != 1:
            # Where the sum comes to lie, so that the vector is only passed over once; in place from then on.
            source, vector = None, weighted(vector, float(weight), self._scratch(vector) if job.compressed else buffer)
        if job.compressed:
            plan = compressor.all_reduce(job.compressed, vector, buffer, self._choose_in_turn)
        else:
            algorithm = self._choose(vector.nbytes)
            plan = ALGORITHMS[algorithm](buffer, job.combine, source=source)
            if job.combine is np.add:
                stand_in = joining.sum_of(buffer.size, buffer.dtype, algorithm)
        pending = self._engine.post(
            key,
            plan,
            job.shapes if len(job.members) > 1 or job.compressed else describe([array]),
            blocking=blocking,
            overlaps=overlaps,
            members=self._members,
            contents=job.contents,
            stand_in=stand_in,
            ready=ready,
        )
        handle = next(self._handles)

        def result() -> np.ndarray:
            done = mean.finished(buffer, functools.partial(self._sum_again, key)) if mean else buffer
            return done.reshape(shape)

        with self._lock:
            self._posted[handle] = (pending, result)
        return handle

    def _scratch(self, like: np.ndarray) -> np.ndarray:
        return self._engine.communicator.take(like.nbytes).view(like.dtype)

    def _sum_again(self, key: str, vector: np.ndarray) -> np.ndarray:
        """A sum of its own, when that of a key is there and has overflowed."""
        algorithm = self._choose_in_turn(vector.nbytes)
        total = self._scratch(vector)
        plan = ALGORITHMS[algorithm](total, source=vector)
        stand_in = joining.sum_of(total.size, total.dtype, algorithm)
        self._engine.run(f"{key}: once more, scaled", plan, members=self._members, stand_in=stand_in)
        return total

    @property
    def _size(self) -> int:
        return self._engine.size if self._members is None else len(self._members)

    def _choose(self, nbytes: int) -> str:
        hosts = self._engine.communicator.hosts
        if self._members is not None:
            hosts = tuple(hosts[member] for member in self._members)
        return algorithms.choose(self._algorithm, hosts, nbytes, self._calibration)

    def _choose_in_turn(self, nbytes: int) -> str:
        """An algorithm for one of several steps of a collective, which the library's own cannot be."""
        algorithm = self._choose(nbytes)
        return "ring" if algorithm == "mpi" else algorithm

    def _collect(self, handle: int, blocking: bool = False) -> tf.Tensor:
        with self._lock:
            pending, result = self._posted.pop(handle)
        self._engine.wait(pending, blocking)
        return to_tensor(result())

    def _host_slices(
        self,
        key: str,
        share: tf.Tensor,
        values: tf.Tensor,
        indices: tf.Tensor,
        dense_shape: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers rows; or, with a dense shape, sums them where that sends fewer bytes.

        How many rows there are is known only when they are, so all processes first tell each other and choose alike.
        """
        rows, places = np.asarray(values), np.asarray(indices)
        if not float(tf.cast(share, tf.float64)):
            rows, places = rows[:0], places[:0]
        elif share.dtype == tf.float64:
            rows = weighted(rows.reshape(-1), float(share), np.empty_like(rows).reshape(-1)).reshape(rows.shape)
        run = functools.partial(self._engine.run, members=self._members)

        def gather(what: str, array: np.ndarray) -> np.ndarray:
            stand_in = joining.rows_of(array.shape[1:], array.dtype)
            return run(f"{key}: {what}", all_gather_rows(np.ascontiguousarray(array)), stand_in=stand_in)[0]

        if dense_shape is None:
            return to_tensor(gather("rows", rows)), to_tensor(gather("indices", places))
        shape = tuple(int(size) for size in np.asarray(dense_shape))
        counts = gather("count", np.array([len(rows)], np.int64))
        row_bytes = int(np.prod(shape[1:])) * rows.dtype.itemsize
        if int(counts.sum()) * (row_bytes + places.itemsize) < 2 * shape[0] * row_bytes:
            return to_tensor(gather("rows", rows)), to_tensor(gather("indices", places))
        dense = self._engine.communicator.take(shape[0] * row_bytes).view(rows.dtype).reshape(shape)
        dense[...] = 0
        np.add.at(dense, places, rows)
        algorithm = self._choose(dense.nbytes)
        stand_in = joining.sum_of(dense.size, dense.dtype, algorithm)
        run(f"{key}: dense", ALGORITHMS[algorithm](dense.reshape(-1)), stand_in=stand_in)
        return to_tensor(dense), tf.range(shape[0], dtype=indices.dtype)


def _as_tensors(slices: tf.IndexedSlices) -> tuple[tf.IndexedSlices, tf.Tensor | None]:
    """The slices with components that users may have given as lists, and the dense shape, if known, as int64."""
    shape = None if slices.dense_shape is None else tf.cast(slices.dense_shape, tf.int64)
    values, indices = tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)
    return tf.IndexedSlices(values, indices, shape), shape


def _alone(tensor: tf.Tensor, how: Compressed | None) -> tf.Tensor:
    """What becomes of a tensor without other processes: at most it gets momentum."""
    if how is None or not how.momentum:
        return tensor
    applied = tf.py_function(
        lambda given: to_tensor(how.alone(np.asarray(given))), [tensor], tensor.dtype, name="tfdist_momentum"
    )
    applied.set_shape(tensor.shape)
    return applied


def _weight(weight: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if not all(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors):
        raise ValueError(f"a weight is for tensors of floating point; got {[t.dtype.name for t in tensors]}")
    return tf.cast(weight, tf.float64)


def _weighted_alone(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    return tf.where(weight != 0, tensor * tf.cast(weight, tensor.dtype), tf.zeros_like(tensor))


def _plan(tensors: Sequence[tf.Tensor], compressed: Sequence[Compressed | None]) -> list[Bucket]:
    """Buckets for tensors whose size is known when they are traced; others go alone, compressed ones by themselves."""
    sizes = []
    for tensor in tensors:
        elements = tensor.shape.num_elements()
        sizes.append(buckets.BUCKET_BYTES if elements is None else elements * tensor.dtype.size)
    kinds = [(tensor.dtype, how is not None) for tensor, how in zip(tensors, compressed, strict=True)]
    return buckets.plan(sizes, kinds)
