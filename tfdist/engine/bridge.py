"""All-reduces of TensorFlow tensors by the engine; in graphs and eagerly.

Three rules:

- The input is never written, because it may be a constant, a variable's buffer or a gradient that two variables share.
  It is read without a copy; the sum is written to a buffer from a pool.
- The result is passed to TensorFlow without a copy (DLPack), and its memory returns to the pool when TensorFlow
  releases it.
- TensorFlow runs the host calls of a graph in the order in which they were traced. So all posts are traced
  before the first wait, and bytes move while the graph computes.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import adasum
from tfdist.collectives.schedule import Plan
from tfdist.compression import compressor
from tfdist.compression.compressor import Compressed
from tfdist.engine import buckets, operations
from tfdist.engine.buckets import Bucket
from tfdist.engine.engine import describe
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import host_call
from tfdist.engine.means import Mean
from tfdist.engine.operations import Operation
from tfdist.engine.pending import Pending
from tfdist.engine.weights import checked_weight, weighted, weighted_in_graph
from tfdist.tensors import call_site, to_array, to_tensor


class _Sum:
    """The reduction of one bucket.

    Attributes:
        combine: the ufunc that combines the members.
        members: positions of the members among all tensors.
        contents: names of the members, as text.
        dtype: common dtype of the members.
        shapes: dtypes and shapes of the members, as far as they are known, as text.
        verb: the reduction in one word, such as ``sum``.
        mean: whether the sum is divided by the number of processes.
        adaptive: whether `tfdist.collectives.adasum` combines the members.
        compressed: compression of each member; empty without compression.
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
        adaptive: bool,
    ) -> None:
        self.combine = combine
        self.mean = mean
        self.adaptive = adaptive
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
        """Concatenates the members to one tensor, on their device; a single member is not copied."""
        if len(self._tensors) == 1:
            return self._tensors[0]
        return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in self._tensors], 0)

    def sizes(self, elements: int) -> list[int]:
        """Returns the number of elements of each member.

        Args:
            elements: number of elements of all members together.
        """
        return [elements] if len(self._tensors) == 1 else [tensor.shape.num_elements() for tensor in self._tensors]

    def unpacked(self, total: tf.Tensor) -> list[tf.Tensor]:
        """Splits a tensor like `packed` into the members' parts."""
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
        group: the processes that take part; its algorithm is used.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
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
        adaptive: bool = False,
    ) -> list[tf.Tensor]:
        """Sums each tensor over all processes, or combines them by another ufunc.

        Args:
            tensors: dense tensors of any numeric dtype. Tensors at the same position have the same shape on all
                processes. Give them in the order in which they become available, so that transfers start early.
            combine: a commutative and associative NumPy ufunc of two arguments.
            names: names of the tensors, for messages.
            compressed: compression of each tensor; None for no compression.
            verb: the purpose in one word, the same on all processes; by default derived from ``combine``.
            mean: whether sums are divided by the number of processes (integers are rounded towards zero). A mean does
                not overflow if it is within the range of its dtype. Not for compressed tensors.
            weight: float64 scalar that this process's floating-point tensors are multiplied by before they are
                reduced. If it is 0 they count as zero, even if they hold NaN or infinity. Not with ``mean``.
            adaptive: whether `tfdist.collectives.adasum` combines each tensor, in place of ``combine``. Not with
                ``mean`` or ``compressed``, and for floating-point tensors only.

        Returns:
            The sums, bitwise equal on all processes.

        Raises:
            ValueError: ``weight`` is given for a mean or for integers.
        """
        if not tensors:
            return []
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if weight is not None and mean:
            raise ValueError("all_reduce: a weight cannot be combined with a mean; reduce by sum instead")
        weight = None if weight is None else checked_weight(weight, tensors)
        if self._group.size == 1:
            if weight is not None:
                tensors = [weighted_in_graph(tensor, weight) for tensor in tensors]
            return [
                _alone(tensor, how) for tensor, how in zip(tensors, compressed or [None] * len(tensors), strict=True)
            ]
        names = names or [f"{place + 1} of {len(tensors)}" for place in range(len(tensors))]
        compressed = compressed or [None] * len(tensors)
        verb = verb or ("adasum" if adaptive else "mean" if mean else "sum" if combine is np.add else combine.__name__)
        plan = _plan(tensors, compressed)
        jobs = [_Sum(combine, bucket, tensors, names, compressed, verb, mean, adaptive) for bucket in plan]
        totals = self._sum_eagerly(jobs, weight) if tf.executing_eagerly() else self._sum_in_graph(jobs, weight)
        results: dict[int, tf.Tensor] = {}
        for job, total in zip(jobs, totals, strict=True):
            results.update(zip(job.members, job.unpacked(total), strict=True))
        return [results[place] for place in range(len(tensors))]

    def _sum_eagerly(self, jobs: list[_Sum], weight: tf.Tensor | None) -> list[tf.Tensor]:
        posted = []
        for place, job in enumerate(jobs):
            key = f"eager {job.verb} #{place} of {job.shapes}"
            posted.append(self._post_sum(key, job, job.packed(), weight))
        return [self._collect(handle, blocking=True) for handle in posted]

    def _sum_in_graph(self, jobs: list[_Sum], weight: tf.Tensor | None) -> list[tf.Tensor]:
        """Posts every bucket but the last; a final host call posts the last bucket and waits for all of them."""
        weights = [] if weight is None else [weight]
        handles = []
        for job in jobs[:-1]:
            post = self._poster(self._site(job), job)
            handles.append(host_call(post, [job.packed(), *weights], tf.int64, name="tfdist_post"))
        finish = self._finisher(self._site(jobs[-1]), jobs[-1], len(handles))
        dtypes = [job.dtype for job in jobs]
        return host_call(finish, [jobs[-1].packed(), *handles, *weights], dtypes, name="tfdist_finish")

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
        return call_site(f"{job.verb} of {len(job.members)} {job.dtype.name}", self._group.members)

    # On the host.

    def _post_sum(
        self,
        key: str,
        job: _Sum,
        packed: tf.Tensor,
        weight: tf.Tensor | None = None,
        overlaps: bool = True,
    ) -> int:
        ready = time.monotonic()
        array = to_array(packed)  # no copy; the sum goes into another buffer
        shape = array.shape
        mean = Mean(array, self._group.size) if job.mean else None
        vector = mean.summed if mean else array.reshape(-1)
        buffer = self._scratch(vector)
        source: np.ndarray | None = vector
        if weight is not None and float(weight) != 1:
            # The weighted vector is written into the buffer and summed in place, which saves a pass over the vector.
            source, vector = None, weighted(vector, float(weight), self._scratch(vector) if job.compressed else buffer)
        plan: Plan | Operation
        if job.compressed:
            plan = compressor.all_reduce(job.compressed, vector, buffer, self._group.choose_in_turn)
        elif job.adaptive:
            plan = adasum.all_reduce(buffer, job.sizes(buffer.size), source)
        else:
            plan = operations.all_reduce(buffer, self._group.choose(vector.nbytes), job.combine, source)
        pending = self._group.post(
            key,
            plan,
            job.shapes if len(job.members) > 1 or job.compressed else describe([array]),
            overlaps=overlaps,
            contents=job.contents,
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
        return self._group.take(like.nbytes).view(like.dtype)

    def _sum_again(self, key: str, vector: np.ndarray) -> np.ndarray:
        """Sums a scaled vector, after the unscaled sum has overflowed."""
        algorithm = self._group.choose_in_turn(vector.nbytes)
        total = self._scratch(vector)
        self._group.run(f"{key}: once more, scaled", operations.all_reduce(total, algorithm, source=vector))
        return total

    def _collect(self, handle: int, blocking: bool = False) -> tf.Tensor:
        with self._lock:
            pending, result = self._posted.pop(handle)
        self._group.wait(pending, blocking)
        return to_tensor(result())


def _alone(tensor: tf.Tensor, how: Compressed | None) -> tf.Tensor:
    """Returns the result for a single process: the tensor, with momentum if the compression applies momentum."""
    if how is None or not how.momentum:
        return tensor
    applied = host_call(
        lambda given: to_tensor(how.alone(to_array(given))), [tensor], tensor.dtype, name="tfdist_momentum"
    )
    applied.set_shape(tensor.shape)
    return applied


def _plan(tensors: Sequence[tf.Tensor], compressed: Sequence[Compressed | None]) -> list[Bucket]:
    """Packs tensors into buckets, compressed tensors separately; a tensor of unknown size gets its own bucket."""
    sizes = []
    for tensor in tensors:
        elements = tensor.shape.num_elements()
        sizes.append(buckets.BUCKET_BYTES if elements is None else elements * tensor.dtype.size)
    kinds = [(tensor.dtype, how is not None) for tensor, how in zip(tensors, compressed, strict=True)]
    return buckets.plan(sizes, kinds)
