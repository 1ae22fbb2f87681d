"""Tensors of which each process owns some or some rows: their sums go to the owners, and the owners' values to all.

Sizes are known before, so nothing is sent but values: (P-1)/P of all tensors' bytes each way and process, if all own
the same number of bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.all_gather import all_gather
from tfdist.collectives.reduce_scatter import reduce_scatter
from tfdist.compression import compressor
from tfdist.compression.compressor import Compressed
from tfdist.engine import buckets
from tfdist.engine.buckets import Bucket
from tfdist.engine.group import ProcessGroup
from tfdist.engine.posting import Begun, BucketJob, Posting, concatenated, split
from tfdist.engine.weights import checked_weight, weighted, weighted_in_graph
from tfdist.sharding import Ownership


class Owned:
    """Collectives of tensors that are owned by one process each, or by all in parts.

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
        owners: Sequence[Ownership],
        names: Sequence[str],
        weight: tf.Tensor | None = None,
        compressed: Sequence[Compressed | None] | None = None,
    ) -> list[tf.Tensor]:
        """Sums each tensor over all processes; only its owners get the sum, each its part (reduce-scatter).

        Args:
            tensors: dense tensors whose shapes are known, the same on all processes. Give them in the order in which
                they become available, so that transfers start early.
            owners: the processes in the group that own each tensor.
            names: names of the tensors, for messages.
            weight: float64 scalar that this process's tensors are multiplied by before they are summed; see
                `tfdist.engine.bridge.Bridge.all_reduce`.
            compressed: compression of each tensor, of which one process has all or each has some rows; None for no
                compression.

        Returns:
            This process's parts of the sums that it owns, in the order of ``tensors``.

        Raises:
            ValueError: a weight is given for tensors that are not of floating point.
        """
        weight = None if weight is None else checked_weight(weight, tensors)
        if self._group.size == 1:
            return [tensor if weight is None else weighted_in_graph(tensor, weight) for tensor in tensors]
        compressed = compressed or [None] * len(tensors)
        plan = _plan(tensors, [how is not None for how in compressed])
        jobs = [self._sum(*_of(bucket, tensors, owners, names, compressed)) for bucket in plan]
        return self._run(plan, jobs, weight)

    def _sum(
        self,
        members: Sequence[tf.Tensor],
        owners: Sequence[Ownership],
        names: Sequence[str],
        compressed: Sequence[Compressed | None],
    ) -> _ScatteredSum:
        """Returns the sum of a bucket, of which all members are compressed or none."""
        hows = [how for how in compressed if how is not None]
        if hows:
            return _CompressedSum(self._group, members, owners, names, hows)
        return _ScatteredSum(self._group, members, owners, names)

    @tf.autograph.experimental.do_not_convert
    def gathered(
        self,
        own: Sequence[tf.Tensor],
        specs: Sequence[tf.TensorSpec],
        owners: Sequence[Ownership],
        names: Sequence[str],
        verb: str = "values",
    ) -> list[tf.Tensor]:
        """Sends the value of each tensor from its owners to all processes (all-gather).

        Args:
            own: this process's parts of the tensors that it owns, in the order of ``specs``.
            specs: shape and dtype of each tensor.
            owners: the processes in the group that own each tensor.
            names: names of the tensors, for messages.
            verb: what is sent in one word, for messages.

        Returns:
            The values of the tensors that this process does not have whole, in the order of ``specs``.
        """
        if self._group.size == 1:
            return []
        plan = _plan(specs)
        rest = iter(own)
        values = [next(rest) if owner.includes(self._group.rank) else None for owner in owners]
        jobs = [_Gathered(self._group, verb, *_of(bucket, specs, owners, names, values)) for bucket in plan]
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
    """The collective of one bucket, whose members are sent in the order of their owners: all parts of each in turn.

    Args:
        group: the processes that take part.
        verb: the collective in one word.
        members: the tensors of the bucket, or their shapes and dtypes.
        owners: the owners of each member.
        names: names of the members.

    Attributes:
        received: places of the members in the result, in their order there.
    """

    received: list[int]

    def __init__(
        self,
        group: ProcessGroup,
        verb: str,
        members: Sequence[tf.Tensor | tf.TensorSpec],
        owners: Sequence[Ownership],
        names: Sequence[str],
    ) -> None:
        super().__init__(f"{verb} by owner", members, names)
        self._owners = owners
        self._rank = group.rank
        self._take = group.take
        self._members = members
        self._order = [
            (rank, place) for rank in range(group.size) for place, owner in enumerate(owners) if owner.includes(rank)
        ]
        self._own = [place for rank, place in self._order if rank == group.rank]
        self._sizes = np.zeros((group.size, len(members)), np.int64)
        for rank, place in self._order:
            self._sizes[rank, place] = self._shape(rank, place).num_elements()
        self._parts = _consecutive(self._sizes.sum(axis=1))

    def signature(self, array: np.ndarray) -> str:
        """Returns the shapes and owners of the members."""
        return f"{self.shapes} of ranks {', '.join(map(str, self._owners))}"

    def _shape(self, rank: int, place: int) -> tf.TensorShape:
        """Returns the shape of a process's part of a member."""
        return tf.TensorShape(self._owners[place].shape(self._members[place].shape, rank))

    def _buffer(self, dtype: np.dtype) -> np.ndarray:
        """Returns memory for all members."""
        return self._take(self._parts[-1].stop * dtype.itemsize).view(dtype)

    def _cut(self, vector: np.ndarray) -> list[np.ndarray]:
        """Cuts a vector of all members into a part for each process."""
        return [vector[part] for part in self._parts]


class _ScatteredSum(_OwnedJob):
    """The sum of one bucket, of which each process gets its own parts."""

    def __init__(
        self, group: ProcessGroup, members: Sequence[tf.Tensor], owners: Sequence[Ownership], names: Sequence[str]
    ) -> None:
        super().__init__(group, "sum", members, owners, names)
        self.received = self._own

    def packed(self) -> tf.Tensor:
        """Concatenates the parts of all members."""
        if len(self._members) == 1:
            return self._members[0]
        return concatenated([self._part(rank, place) for rank, place in self._order])

    def begin(self, array: np.ndarray, weight: float | None) -> Begun:
        """Returns the reduce-scatter."""
        vector = array.reshape(-1)
        buffer = self._buffer(vector.dtype)
        inputs = vector if weight is None or weight == 1 else weighted(vector, weight, buffer)
        plan = reduce_scatter(self._cut(buffer), inputs=self._cut(inputs))
        return Begun(plan, lambda _: self._own_part(buffer))

    def unpacked(self, total: tf.Tensor) -> list[tf.Tensor]:
        """Splits the result, a vector of this process's own parts."""
        return _split([self._shape(self._rank, place) for place in self.received], total)

    def _own_part(self, buffer: np.ndarray) -> np.ndarray:
        """Copies this process's part: optimizers keep it longer than the sums of the others are needed."""
        own = buffer[self._parts[self._rank]]
        part = self._take(own.nbytes).view(own.dtype)
        part[...] = own
        return part

    def _part(self, rank: int, place: int) -> tf.Tensor:
        owner, member = self._owners[place], self._members[place]
        return member[owner.part(rank)] if owner.is_cut else member


class _CompressedSum(_ScatteredSum):
    """The sum of one bucket of compressed tensors, of which each process gets its own parts."""

    def __init__(
        self,
        group: ProcessGroup,
        members: Sequence[tf.Tensor],
        owners: Sequence[Ownership],
        names: Sequence[str],
        compressed: Sequence[Compressed],
    ) -> None:
        super().__init__(group, members, owners, names)
        self.verb = "compressed sum by owner"
        self._compressed = compressed
        self._cuts = [_consecutive(sizes) for sizes in self._sizes.T]
        self._choose = group.choose_in_turn

    def signature(self, array: np.ndarray) -> str:
        """Returns the shapes, owners and schedules of the members."""
        return f"{super().signature(array)} by {', '.join(repr(how.schedule) for how in self._compressed)}"

    def packed(self) -> tf.Tensor:
        """Concatenates the members."""
        return concatenated(self._members)

    def begin(self, array: np.ndarray, weight: float | None) -> Begun:
        """Returns the exchange of compressed parts."""
        vector = array.reshape(-1)
        if weight is not None and weight != 1:
            vector = weighted(vector, weight, self._take(vector.nbytes).view(vector.dtype))
        own = self._take(int(self._sizes[self._rank].sum()) * vector.itemsize).view(vector.dtype)
        return Begun(compressor.begin(self._compressed, vector, own, self._choose, self._cuts), lambda _: own)


class _Gathered(_OwnedJob):
    """The values of one bucket, of which each process sends its own parts."""

    def __init__(
        self,
        group: ProcessGroup,
        verb: str,
        members: Sequence[tf.TensorSpec],
        owners: Sequence[Ownership],
        names: Sequence[str],
        values: Sequence[tf.Tensor | None],
    ) -> None:
        super().__init__(group, verb, members, owners, names)
        self._values = [values[place] for place in self._own]
        self.received = [place for place, owner in enumerate(owners) if owner.owner != group.rank]

    def packed(self) -> tf.Tensor:
        """Concatenates this process's own parts."""
        return concatenated(self._values) if self._values else tf.zeros([0], self.dtype)

    def begin(self, array: np.ndarray, weight: float | None) -> Begun:
        """Returns the all-gather."""
        buffer = self._buffer(array.dtype)
        parts = self._cut(buffer)
        parts[self._rank][...] = array.reshape(-1)
        return Begun(all_gather(parts), lambda _: buffer)

    def unpacked(self, total: tf.Tensor) -> list[tf.Tensor]:
        """Splits the result, a vector of all parts, and leaves out the members that this process has whole."""
        if len(self._members) == 1:  # its rows are in their order
            return _split([self._members[place].shape for place in self.received], total)
        parts: dict[int, list[tf.Tensor]] = {place: [] for place in self.received}
        values = _split([self._shape(rank, place) for rank, place in self._order], total)
        for (_, place), value in zip(self._order, values, strict=True):
            if place in parts:
                parts[place].append(value)
        return [listed[0] if len(listed) == 1 else tf.concat(listed, 0) for listed in parts.values()]


def _split(shapes: Sequence[tf.TensorShape], vector: tf.Tensor) -> list[tf.Tensor]:
    """Splits a vector into tensors."""
    return [tf.reshape(vector, shapes[0])] if len(shapes) == 1 else split(vector, shapes) if shapes else []


def _consecutive(sizes: np.ndarray) -> list[slice]:
    """Returns slices of the given sizes, one after the other."""
    ends = np.cumsum(sizes).tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]


def _plan(tensors: Sequence[tf.Tensor | tf.TensorSpec], kinds: Sequence[Any] | None = None) -> list[Bucket]:
    """Packs tensors into buckets; those of other kinds separately."""
    sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    return buckets.plan(sizes, dtypes if kinds is None else list(zip(dtypes, kinds, strict=True)))


def _of(bucket: Bucket, *values: Sequence[Any]) -> list[list[Any]]:
    """Returns what belongs to the members of a bucket."""
    return [[listed[member] for member in bucket.members] for listed in values]
