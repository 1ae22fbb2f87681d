"""Tensors of which each process owns some: their sums go to the owners, and the owners' values to all processes.

Sizes are known before, so nothing is sent but values: (P-1)/P of all tensors' bytes each way and process, if all own
the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.all_gather import all_gather
from tfdist.collectives.reduce_scatter import reduce_scatter
from tfdist.engine import buckets
from tfdist.engine.buckets import Bucket
from tfdist.engine.group import ProcessGroup
from tfdist.engine.posting import Begun, BucketJob, Posting, concatenated, split
from tfdist.engine.weights import checked_weight, weighted, weighted_in_graph


class Owned:
    """Collectives of tensors that are owned by one process each.

    Args:
        group: the processes that take part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._posting = Posting(group)

    @tf.autograph.experimental.do_not_convert
    def sums(
        self,
        tensors: Sequence[tf.Tensor],
        owners: Sequence[int],
        names: Sequence[str],
        weight: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """Sums each tensor over all processes; only its owner gets the sum (reduce-scatter).

        Args:
            tensors: dense tensors whose shapes are known, the same on all processes. Give them in the order in which
                they become available, so that transfers start early.
            owners: rank in the group of the owner of each tensor.
            names: names of the tensors, for messages.
            weight: float64 scalar that this process's tensors are multiplied by before they are summed; see
                `tfdist.engine.bridge.Bridge.all_reduce`.

        Returns:
            The sums that this process owns, in the order of ``tensors``.

        Raises:
            ValueError: a weight is given for tensors that are not of floating point.
        """
        weight = None if weight is None else checked_weight(weight, tensors)
        if self._group.size == 1:
            return [tensor if weight is None else weighted_in_graph(tensor, weight) for tensor in tensors]
        plan = _plan(tensors)
        jobs = [_ScatteredSum(self._group, *_of(bucket, tensors, owners, names)) for bucket in plan]
        return self._run(plan, jobs, weight)

    @tf.autograph.experimental.do_not_convert
    def gathered(
        self, values: Sequence[tf.Tensor | tf.TensorSpec], owners: Sequence[int], names: Sequence[str]
    ) -> list[tf.Tensor]:
        """Sends the value of each tensor from its owner to all processes (all-gather).

        Args:
            values: value of each tensor that this process owns; shape and dtype of each other one.
            owners: rank in the group of the owner of each tensor.
            names: names of the tensors, for messages.

        Returns:
            The values of the tensors that other processes own, in the order of ``values``.
        """
        if self._group.size == 1:
            return []
        plan = _plan(values)
        jobs = [_Gathered(self._group, *_of(bucket, values, owners, names)) for bucket in plan]
        return self._run(plan, jobs)

    def _run(
        self, plan: Sequence[Bucket], jobs: Sequence[_OwnedJob], weight: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        results: dict[int, tf.Tensor] = {}
        if not jobs:
            return []
        for bucket, job, tensors in zip(plan, jobs, self._posting.run(jobs, weight), strict=True):
            results.update(zip((bucket.members[place] for place in job.received), tensors, strict=True))
        return [results[place] for place in sorted(results)]


class _OwnedJob(BucketJob):
    """The collective of one bucket, whose members are sent in the order of their owners.

    Args:
        group: the processes that take part.
        verb: the collective in one word.
        members: the tensors of the bucket, or their shapes and dtypes.
        owners: rank of the owner of each member.
        names: names of the members.

    Attributes:
        received: places of the members in the result, in their order there.
    """

    def __init__(
        self,
        group: ProcessGroup,
        verb: str,
        members: Sequence[tf.Tensor | tf.TensorSpec],
        owners: Sequence[int],
        names: Sequence[str],
    ) -> None:
        super().__init__(f"{verb} by owner", members, names)
        self._owners = ", ".join(map(str, owners))
        self._rank = group.rank
        self._take = group.take
        self._members = members
        self._order = sorted(range(len(members)), key=lambda place: owners[place])
        self._own = [place for place in self._order if owners[place] == group.rank]
        counts = [0] * group.size
        for member, owner in zip(members, owners, strict=True):
            counts[owner] += member.shape.num_elements()
        ends = [int(end) for end in np.cumsum(counts)]
        self._parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.received: list[int] = []

    def signature(self, array: np.ndarray) -> str:
        """Returns the shapes and owners of the members."""
        return f"{self.shapes} of ranks {self._owners}"

    def _buffer(self, dtype: np.dtype) -> np.ndarray:
        """Returns memory for all members."""
        return self._take(self._parts[-1].stop * dtype.itemsize).view(dtype)

    def _cut(self, vector: np.ndarray) -> list[np.ndarray]:
        """Cuts a vector of all members into a part for each owner."""
        return [vector[part] for part in self._parts]


class _ScatteredSum(_OwnedJob):
    """The sum of one bucket, of which each process gets its own members."""

    def __init__(
        self, group: ProcessGroup, members: Sequence[tf.Tensor], owners: Sequence[int], names: Sequence[str]
    ) -> None:
        super().__init__(group, "sum", members, owners, names)
        self.received = self._own

    def packed(self) -> tf.Tensor:
        """Concatenates all members."""
        return concatenated([self._members[place] for place in self._order])

    def begin(self, array: np.ndarray, weight: float | None) -> Begun:
        """Returns the reduce-scatter."""
        vector = array.reshape(-1)
        buffer = self._buffer(vector.dtype)
        inputs = vector if weight is None or weight == 1 else weighted(vector, weight, buffer)
        own = self._parts[self._rank]
        plan = reduce_scatter(self._cut(buffer), inputs=self._cut(inputs))
        return Begun(plan, lambda _: buffer[own])

    def unpacked(self, total: tf.Tensor) -> list[tf.Tensor]:
        """Splits the result, a vector of this process's own members."""
        return _split([self._members[place].shape for place in self.received], total)


class _Gathered(_OwnedJob):
    """The values of one bucket, of which each process sends its own members."""

    def __init__(
        self,
        group: ProcessGroup,
        members: Sequence[tf.Tensor | tf.TensorSpec],
        owners: Sequence[int],
        names: Sequence[str],
    ) -> None:
        super().__init__(group, "values", members, owners, names)
        self.received = [place for place in self._order if owners[place] != group.rank]

    def packed(self) -> tf.Tensor:
        """Concatenates this process's own members."""
        return concatenated([self._members[place] for place in self._own]) if self._own else tf.zeros([0], self.dtype)

    def begin(self, array: np.ndarray, weight: float | None) -> Begun:
        """Returns the all-gather."""
        buffer = self._buffer(array.dtype)
        parts = self._cut(buffer)
        parts[self._rank][...] = array.reshape(-1)
        return Begun(all_gather(parts), lambda _: buffer)

    def unpacked(self, total: tf.Tensor) -> list[tf.Tensor]:
        """Splits the result, a vector of all members, and leaves out this process's own."""
        values = _split([self._members[place].shape for place in self._order], total)
        return [value for place, value in zip(self._order, values, strict=True) if place in self.received]


def _split(shapes: Sequence[tf.TensorShape], vector: tf.Tensor) -> list[tf.Tensor]:
    """Splits a vector into tensors."""
    return [tf.reshape(vector, shapes[0])] if len(shapes) == 1 else split(vector, shapes) if shapes else []


def _plan(tensors: Sequence[tf.Tensor | tf.TensorSpec]) -> list[Bucket]:
    sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
    return buckets.plan(sizes, [tensor.dtype for tensor in tensors])


def _of(bucket: Bucket, *values: Sequence[Any]) -> list[list[Any]]:
    """Returns what belongs to the members of a bucket."""
    return [[listed[member] for member in bucket.members] for listed in values]
