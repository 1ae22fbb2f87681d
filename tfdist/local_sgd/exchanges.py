"""The exchanges of a round: sums of what the processes bring, and weighted sums of their arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tfdist.collectives.schedule import Plan
from tfdist.compression import compressor
from tfdist.compression.compressor import Compressed, Compressor
from tfdist.engine import operations
from tfdist.engine.engine import describe
from tfdist.engine.group import ProcessGroup
from tfdist.engine.operations import Operation
from tfdist.engine.pending import Pending
from tfdist.engine.weights import weighted


class Attendance(NamedTuple):
    """What one process brings to an exchange, or the totals over all processes.

    Attributes:
        samples: number of samples trained on since the variables were last exchanged.
        steps: number of steps taken since then.
        ended: number of processes that have no more steps to take for now.
        average: in local SGD, number of processes that are to average everything: all that have not ended, or none. In
            gossip, number of processes that have trained.
        wishes: number of processes that request that all take no more steps.
    """

    samples: int
    steps: int
    ended: int
    average: int
    wishes: int = 0


@dataclass(frozen=True)
class _Bucket:
    """Arrays that are summed as one vector.

    Attributes:
        members: indices of the arrays among those of the sum.
        parts: where each is in the vector.
        shapes: shape of each.
        dtype: their dtype.
        is_compressed: whether they are compressed.
        key: key of the sum.
        signature: their dtypes and shapes, as text.
        contents: their names, as text.
    """

    members: list[int]
    parts: list[slice]
    shapes: list[tuple[int, ...]]
    dtype: np.dtype
    is_compressed: bool
    key: str
    signature: str
    contents: str

    @property
    def nbytes(self) -> int:
        """Number of bytes of the vector."""
        return self.parts[-1].stop * self.dtype.itemsize


class PendingSum(NamedTuple):
    """A weighted sum that is under way.

    Attributes:
        pending: the transfers, each with its bucket and the vector for the sum; none for a process alone.
        own: the arrays of a process alone.
    """

    pending: Sequence[tuple[Pending, _Bucket, np.ndarray]]
    own: Sequence[np.ndarray] = ()

    def arrays(self) -> list[np.ndarray]:
        """Returns the sums, once all transfers are complete."""
        sums = dict(enumerate(self.own))
        for _, bucket, vector in self.pending:
            for member, part, shape in zip(bucket.members, bucket.parts, bucket.shapes, strict=True):
                sums[member] = vector[part].reshape(shape)
        return [sums[member] for member in range(len(sums))]


class Exchanges:
    """Exchanges between the processes that train the variables of one optimizer.

    A process alone has its own values as sums, whatever the weight.

    Args:
        group: the processes.
        name: name of the exchanges, the same on all processes.
        names: names of the variables.
        compressor: compressor of the exchanged arrays; None for no compression.
        keys: keys of the variables in the compressor, where they are registered; without it, none are needed.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        names: Sequence[str],
        compressor: Compressor | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        self._group = group
        self._name = name
        self._names = names
        self._compressor = compressor if group.size > 1 else None
        self._keys = keys
        self._buckets: dict[tuple[tuple[int, ...], tuple[bool, ...]], list[_Bucket]] = {}

    def attend(self, attendance: Attendance) -> Attendance:
        """Adds up what all processes bring to the next exchange; all of them call it.

        Args:
            attendance: what this process brings.
        """
        return Attendance(*self._together(np.array(attendance, np.int64), np.add, "participants of a round"))

    def furthest(self, step: int) -> int:
        """Returns the largest number of steps of any process; all call it, and do nothing else meanwhile.

        Args:
            step: number of steps that this process has taken.
        """
        return self._together(np.array([step], np.int64), np.maximum, "largest number of steps")[0]

    def total(self, value: float) -> float:
        """Returns the sum of a value over all processes; all call it, and do nothing else meanwhile.

        Args:
            value: value of this process.
        """
        return self._together(np.array([value], np.float64), np.add, "a sum")[0]

    def _together(self, numbers: np.ndarray, combine: np.ufunc, what: str) -> list[Any]:
        if self._group.size == 1:
            return numbers.tolist()
        total = self._group.take(numbers.nbytes).view(numbers.dtype)
        plan = operations.all_reduce(total, self._group.choose(numbers.nbytes), combine, numbers)
        self._group.run(f"{self._name}: {what}", plan, describe([numbers]))
        return total.tolist()

    def begin(
        self, places: Sequence[int], arrays: Sequence[np.ndarray], weight: float, *, overlaps: bool
    ) -> PendingSum:
        """Begins a weighted sum over all processes; all of them call it.

        Args:
            places: indices of the variables.
            arrays: arrays of this process, one for each of the variables, of equal dtypes and shapes in all calls; only
                read.
            weight: weight of this process. With 0 its arrays count as zero, even if they hold NaN or infinity.
            overlaps: whether this process computes meanwhile; false if `finish` follows at once.
        """
        if self._group.size == 1:
            return PendingSum([], arrays)
        how = [self._compressed(place, array) for place, array in zip(places, arrays, strict=True)]
        chosen = tuple(places), tuple(tensor is not None for tensor in how)
        if chosen not in self._buckets:
            self._buckets[chosen] = self._planned(*chosen, arrays)
        pending = []
        for bucket in self._buckets[chosen]:
            vector = self._group.take(bucket.nbytes).view(bucket.dtype)
            np.concatenate([arrays[member].reshape(-1) for member in bucket.members], out=vector)
            weighted(vector, weight, vector)
            plan: Plan | Operation
            if bucket.is_compressed:
                total = self._group.take(bucket.nbytes).view(bucket.dtype)
                compressed = [tensor for tensor in (how[member] for member in bucket.members) if tensor is not None]
                plan = compressor.begin(compressed, vector, total, self._group.choose_in_turn)
            else:
                total = vector
                plan = operations.all_reduce(total, self._group.choose(bucket.nbytes))
            posted = self._group.post(bucket.key, plan, bucket.signature, overlaps=overlaps, contents=bucket.contents)
            pending.append((posted, bucket, total))
        return PendingSum(pending)

    def _planned(
        self, places: Sequence[int], are_compressed: Sequence[bool], arrays: Sequence[np.ndarray]
    ) -> list[_Bucket]:
        kinds: dict[tuple[np.dtype, bool], list[int]] = {}
        for member, array in enumerate(arrays):
            kinds.setdefault((array.dtype, are_compressed[member]), []).append(member)
        buckets = []
        for (dtype, is_compressed), members in kinds.items():
            own = [arrays[member] for member in members]
            ends = itertools.accumulate((array.size for array in own), initial=0)
            parts = list(itertools.starmap(slice, itertools.pairwise(ends)))
            shapes = [array.shape for array in own]
            key = f"{self._name}: {'compressed ' if is_compressed else ''}{dtype} of variable {places[members[0]]}"
            contents = ", ".join(self._names[places[member]] for member in members)
            buckets.append(_Bucket(members, parts, shapes, dtype, is_compressed, key, describe(own), contents))
        return buckets

    def finish(self, begun: PendingSum) -> list[np.ndarray]:
        """Waits for a sum and returns its arrays.

        Args:
            begun: the sum to wait for.
        """
        for pending, _, _ in begun.pending:
            self._group.wait(pending)
        return begun.arrays()

    def _compressed(self, place: int, array: np.ndarray) -> Compressed | None:
        return None if self._compressor is None else self._compressor.tensor(self._keys[place], array)
