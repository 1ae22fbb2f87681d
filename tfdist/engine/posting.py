"""Collectives of buckets of TensorFlow tensors: all are posted before the first is waited for; in graphs and eagerly.

TensorFlow runs the host calls of a graph in the order in which they were traced. So all posts are traced before the
first wait, and bytes move while the graph computes.
"""

from __future__ import annotations

import abc
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.schedule import Plan
from tfdist.engine.call_sites import call_site
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import host_call
from tfdist.engine.operations import Operation
from tfdist.engine.pending import Pending
from tfdist.tensors import to_array, to_tensor


@dataclass(frozen=True)
class Begun:
    """A collective of a bucket that is ready to be posted.

    Attributes:
        plan: the collective.
        result: function that returns the bucket's result when the collective is over.
    """

    plan: Plan | Operation
    result: Callable[[str], np.ndarray]


class BucketJob(abc.ABC):
    """The collective of one bucket.

    Args:
        verb: the collective in one word, such as ``sum``.
        tensors: the members of the bucket.
        names: names of the members.

    Attributes:
        verb: as given.
        contents: names of the members, as text.
        count: number of the members.
        dtype: common dtype of the members.
        shapes: dtypes and shapes of the members, as far as they are known, as text.
    """

    def __init__(self, verb: str, tensors: Sequence[tf.Tensor | tf.TensorSpec], names: Sequence[str]) -> None:
        self.verb = verb
        self.contents = ", ".join(names)
        self.count = len(tensors)
        self.dtype = tensors[0].dtype
        self.shapes = ", ".join(f"{tensor.dtype.name} {tensor.shape}" for tensor in tensors)

    @property
    def result_shape(self) -> tf.TensorShape:
        """Static shape of the collective's result; by default it is not known."""
        return tf.TensorShape(None)

    @abc.abstractmethod
    def packed(self) -> tf.Tensor:
        """Returns this process's part of the bucket as one tensor, on its device."""

    @abc.abstractmethod
    def begin(self, array: np.ndarray, weight: float | None) -> Begun:
        """Returns the collective, on the host.

        Args:
            array: the tensor that `packed` returned; only read.
            weight: factor that this process's values are multiplied by; None for no factor.
        """

    @abc.abstractmethod
    def unpacked(self, total: tf.Tensor) -> list[tf.Tensor]:
        """Splits the result into tensors."""

    def signature(self, array: np.ndarray) -> str:
        """Returns the text that must be equal on all processes.

        Args:
            array: the tensor that `packed` returned.
        """
        return self.shapes


_SMALL = 4096
"""The number of elements up to which eager tensors are packed by NumPy. TensorFlow takes 50 microseconds a tensor."""


def concatenated(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors to a vector; a single tensor is not copied, and keeps its shape.

    A tape that records eager operations may not see it.
    """
    if len(tensors) == 1:
        return tensors[0]
    if _are_small([tensor.shape for tensor in tensors]):
        return tf.constant(np.concatenate([to_array(tensor).reshape(-1) for tensor in tensors]))
    return tf.concat([tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def split(total: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Splits a tensor like `concatenated` into tensors.

    Args:
        total: vector; for a single shape, a tensor of that shape.
        shapes: shape of each tensor.
    """
    if len(shapes) == 1:
        total.set_shape(shapes[0])
        return [total]
    sizes = [shape.num_elements() for shape in shapes]
    if _are_small(shapes):
        parts = np.split(to_array(total), np.cumsum(sizes[:-1]))
        return [tf.constant(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)]
    total.set_shape([sum(sizes)])
    pairs = zip(tf.split(total, sizes), shapes, strict=True)
    return [part if shape.rank == 1 else tf.reshape(part, shape) for part, shape in pairs]


def _are_small(shapes: Sequence[tf.TensorShape]) -> bool:
    """Returns whether NumPy packs tensors. Not with GPUs, which each tensor would cross to and from by itself."""
    is_on_host = tf.executing_eagerly() and not tf.config.list_logical_devices("GPU")
    return is_on_host and sum(shape.num_elements() for shape in shapes) <= _SMALL


class Posting:
    """Runs the collectives of buckets.

    Args:
        group: the processes that take part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._posted: dict[int, tuple[Pending, Callable[[], np.ndarray]]] = {}
        self._handles = itertools.count()
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[BucketJob], weight: tf.Tensor | None = None) -> list[list[tf.Tensor]]:
        """Runs jobs, now or from the graph under construction; returns the tensors of each.

        Args:
            jobs: at least one job, in the order in which their tensors become available.
            weight: float64 scalar that this process's values are multiplied by.
        """
        totals = self._eagerly(jobs, weight) if tf.executing_eagerly() else self._in_graph(jobs, weight)
        return [job.unpacked(total) for job, total in zip(jobs, totals, strict=True)]

    def _eagerly(self, jobs: Sequence[BucketJob], weight: tf.Tensor | None) -> list[tf.Tensor]:
        posted = []
        for place, job in enumerate(jobs):
            key = f"eager {job.verb} #{place} of {job.shapes}"
            is_last = place == len(jobs) - 1  # its wait follows at once
            array = to_array(job.packed())
            posted.append(self._post(key, job, array, weight, overlaps=not is_last))
        return [to_tensor(self._collect(handle)) for handle in posted]

    def _in_graph(self, jobs: Sequence[BucketJob], weight: tf.Tensor | None) -> list[tf.Tensor]:
        """Posts every bucket but the last; a final host call posts the last bucket and waits for all of them."""
        weights = [] if weight is None else [weight]
        handles = []
        for job in jobs[:-1]:
            post = self._poster(self._site(job), job)
            handles.append(host_call(post, [job.packed(), *weights], tf.TensorSpec([], tf.int64), name="tfdist_post"))
        finish = self._finisher(self._site(jobs[-1]), jobs[-1], len(handles))
        specs = [tf.TensorSpec(job.result_shape, job.dtype) for job in jobs]
        return host_call(finish, [jobs[-1].packed(), *handles, *weights], specs, name="tfdist_finish")

    def _poster(self, key: str, job: BucketJob) -> Callable[..., np.int64]:
        def post(packed: np.ndarray, weight: np.ndarray | None = None) -> np.int64:
            return np.int64(self._post(key, job, packed, weight))

        return post

    def _finisher(self, key: str, last: BucketJob, posted: int) -> Callable[..., list[np.ndarray]]:
        def finish(packed: np.ndarray, *rest: np.ndarray) -> list[np.ndarray]:
            weight = rest[posted] if len(rest) > posted else None
            final = self._post(key, last, packed, weight, overlaps=False)
            return [self._collect(handle) for handle in (*map(int, rest[:posted]), final)]

        return finish

    def _site(self, job: BucketJob) -> str:
        return call_site(f"{job.verb} of {job.count} {job.dtype.name}", self._group.members)

    # On the host.

    def _post(self, key: str, job: BucketJob, array: np.ndarray, weight: Any = None, overlaps: bool = True) -> int:
        ready = time.monotonic()
        begun = job.begin(array, None if weight is None else float(weight))
        pending = self._group.post(
            key, begun.plan, job.signature(array), overlaps=overlaps, contents=job.contents, ready=ready
        )
        handle = next(self._handles)
        with self._lock:
            self._posted[handle] = (pending, lambda: begun.result(key))
        return handle

    def _collect(self, handle: int) -> np.ndarray:
        with self._lock:
            pending, result = self._posted.pop(handle)
        self._group.wait(pending)
        return result()
