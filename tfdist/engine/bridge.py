"""All-reduces of TensorFlow tensors by the engine; in graphs and eagerly.

Two rules:

- The input is never written, because it may be a constant, a variable's buffer or a gradient that two variables share.
  It is read without a copy; the sum is written to a buffer from a pool.
- The result is passed to TensorFlow without a copy (DLPack), and its memory returns to the pool when TensorFlow
  releases it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
from tfdist.engine.posting import Begun, BucketJob, Posting, concatenated, split
from tfdist.engine.shared_sums import BUCKET_BYTES, DTYPES, SharedSums
from tfdist.engine.weights import checked_weight, weighted, weighted_in_graph


class _Sum(BucketJob):
    """The reduction of one bucket.

    Args:
        group: the processes that take part.
        combine: the ufunc that combines the members.
        members: the tensors of the bucket.
        names: names of the members.
        compressed: compression of each member; None for no compression.
        verb: the reduction in one word, such as ``sum``.
        mean: whether the sum is divided by the number of processes.
        adaptive: whether `tfdist.collectives.adasum` combines the members.
    """

    def __init__(
        self,
        group: ProcessGroup,
        combine: np.ufunc,
        members: Sequence[tf.Tensor],
        names: Sequence[str],
        compressed: Sequence[Compressed | None],
        verb: str,
        mean: bool,
        adaptive: bool,
    ) -> None:
        self._compressed = [how for how in compressed if how is not None]
        super().__init__(f"compressed {verb}" if self._compressed else verb, members, names)
        if self._compressed:
            self.shapes += f" by {', '.join(repr(how.schedule) for how in self._compressed)}"
        self._group = group
        self._combine = combine
        self._tensors = members
        self._mean = mean
        self._adaptive = adaptive

    @property
    def result_shape(self) -> tf.TensorShape:
        """The shape of the packed members."""
        shapes = [tensor.shape for tensor in self._tensors]
        return shapes[0] if len(shapes) == 1 else tf.TensorShape([sum(shape.num_elements() for shape in shapes)])

    def packed(self) -> tf.Tensor:
        """Concatenates the members to one tensor, on their device; a single member is not copied."""
        return concatenated(self._tensors)

    def unpacked(self, total: tf.Tensor) -> list[tf.Tensor]:
        """Splits a tensor like `packed` into the members' parts."""
        return split(total, [tensor.shape for tensor in self._tensors])

    def signature(self, array: np.ndarray) -> str:
        """Returns the shapes; that of a single member may be unknown before."""
        return self.shapes if self.count > 1 or self._compressed else describe([array])

    def begin(self, array: np.ndarray, weight: float | None) -> Begun:
        """Returns the reduction; its result is written to a buffer from the pool."""
        shape = array.shape
        mean = Mean(array, self._group.size) if self._mean else None
        vector = mean.summed if mean else array.reshape(-1)
        buffer = self._scratch(vector)
        source: np.ndarray | None = vector
        if weight is not None and weight != 1:
            # The weighted vector is written into the buffer and summed in place, which saves a pass over the vector.
            source, vector = None, weighted(vector, weight, self._scratch(vector) if self._compressed else buffer)
        plan: Plan | Operation
        if self._compressed:
            plan = compressor.begin(self._compressed, vector, buffer, self._group.choose_in_turn)
        elif self._adaptive:
            plan = adasum.all_reduce(buffer, self._sizes(buffer.size), source)
        else:
            algorithm = self._group.choose(vector.nbytes)
            division = mean.division(algorithm) if mean else None
            plan = operations.all_reduce(buffer, algorithm, self._combine, source, division)

        def result(key: str) -> np.ndarray:
            if mean is None:
                return buffer.reshape(shape)
            again = functools.partial(self._sum_again, key)
            return mean.finished(buffer, again, is_divided=division is not None).reshape(shape)

        return Begun(plan, result)

    def _sizes(self, elements: int) -> list[int]:
        """Returns the number of elements of each member, of which there are ``elements`` together."""
        return [elements] if self.count == 1 else [tensor.shape.num_elements() for tensor in self._tensors]

    def _scratch(self, like: np.ndarray) -> np.ndarray:
        return self._group.take(like.nbytes).view(like.dtype)

    def _sum_again(self, key: str, vector: np.ndarray) -> np.ndarray:
        """Sums a scaled vector, after the unscaled sum has overflowed."""
        algorithm = self._group.choose_in_turn(vector.nbytes)
        total = self._scratch(vector)
        self._group.run(f"{key}: once more, scaled", operations.all_reduce(total, algorithm, source=vector))
        return total


class Bridge:
    """All-reduces of TensorFlow tensors; `tfdist.engine.exchange` has the other collectives.

    Args:
        group: the processes that take part; its algorithm is used.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._posting = Posting(group)
        self._shared = SharedSums(group)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._group.size

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
        in_memory: bool = False,
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
            in_memory: whether `tfdist.engine.shared_sums` may sum in memory that the processes share. Not where the
                static shape of a tensor could be unknown on one process only, nor where one could have joined.

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
        results: dict[int, tf.Tensor] = {}
        if in_memory and self._shared.is_usable and combine is np.add and not (mean or adaptive):
            results = self._in_memory(tensors, names, compressed, weight)
        rest = [place for place in range(len(tensors)) if place not in results]
        plan = _plan([tensors[place] for place in rest], [compressed[place] for place in rest])
        jobs = [
            _Sum(
                self._group,
                combine,
                [tensors[rest[member]] for member in bucket.members],
                [names[rest[member]] for member in bucket.members],
                [compressed[rest[member]] for member in bucket.members],
                verb,
                mean,
                adaptive,
            )
            for bucket in plan
        ]
        for bucket, totals in zip(plan, self._posting.run(jobs, weight) if jobs else [], strict=True):
            results.update(zip((rest[member] for member in bucket.members), totals, strict=True))
        return [results[place] for place in range(len(tensors))]

    def _in_memory(
        self,
        tensors: Sequence[tf.Tensor],
        names: Sequence[str],
        compressed: Sequence[Compressed | None],
        weight: tf.Tensor | None,
    ) -> dict[int, tf.Tensor]:
        """Returns the sums that are made in memory, by place."""
        results: dict[int, tf.Tensor] = {}
        places = [
            place
            for place, tensor in enumerate(tensors)
            if tensor.dtype in DTYPES and compressed[place] is None and tensor.shape.is_fully_defined()
        ]
        sizes = [tensors[place].shape.num_elements() * tensors[place].dtype.size for place in places]
        for bucket in buckets.plan(sizes, [tensors[place].dtype for place in places], BUCKET_BYTES, BUCKET_BYTES):
            if any(sizes[member] for member in bucket.members):
                members = [places[member] for member in bucket.members]
                given = [tensors[place] for place in members]
                sums = self._shared.all_reduce(given, [names[place] for place in members], weight)
                results.update(zip(members, sums, strict=True))
        return results


def _alone(tensor: tf.Tensor, how: Compressed | None) -> tf.Tensor:
    """Returns the result for a single process: the tensor, with momentum if the compression applies momentum."""
    if how is None or not how.momentum:
        return tensor
    return host_call(how.alone, [tensor], tf.TensorSpec(tensor.shape, tensor.dtype), name="tfdist_momentum")


def _plan(tensors: Sequence[tf.Tensor], compressed: Sequence[Compressed | None]) -> list[Bucket]:
    """Packs tensors into buckets, compressed tensors separately; a tensor of unknown size gets its own bucket."""
    sizes = []
    for tensor in tensors:
        elements = tensor.shape.num_elements()
        sizes.append(buckets.BUCKET_BYTES if elements is None else elements * tensor.dtype.size)
    kinds = [(tensor.dtype, how is not None) for tensor, how in zip(tensors, compressed, strict=True)]
    return buckets.plan(sizes, kinds)
