"""The exchanges of a round: sums of what the processes bring, and weighted sums of their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.collectives.schedule import Plan
from tfdist.compression import compressor
from tfdist.compression.compressor import Compressed, Compressor
from tfdist.engine import operations
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


class PendingSum:
    """A weighted sum that is under way.

    Args:
        pending: transfers, each with the indices of its arrays and with the buffer for their sum.
        shapes: shapes of the arrays.
    """

    def __init__(
        self, pending: Sequence[tuple[Pending | None, list[int], np.ndarray]], shapes: list[tuple[int, ...]]
    ) -> None:
        self.pending = pending
        self._shapes = shapes

    def arrays(self) -> list[np.ndarray]:
        """Returns the sums, once all transfers are complete."""
        sums: dict[int, np.ndarray] = {}
        for _, places, buffer in self.pending:
            sizes = [int(np.prod(self._shapes[place])) for place in places]
            for place, part in zip(places, np.split(buffer, np.cumsum(sizes)[:-1]), strict=True):
                sums[place] = part.reshape(self._shapes[place])
        return [sums[place] for place in range(len(self._shapes))]


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
        self._group.run(f"{self._name}: {what}", plan, f"{numbers.dtype.name} {numbers.shape}")
        return total.tolist()

    def begin(
        self, places: Sequence[int], arrays: Sequence[np.ndarray], weight: float, *, overlaps: bool
    ) -> PendingSum:
        """Begins a weighted sum over all processes; all of them call it.

        Args:
            places: indices of the variables.
            arrays: arrays of this process, one for each of the variables; only read.
            weight: weight of this process. With 0 its arrays count as zero, even if they hold NaN or infinity.
            overlaps: whether this process computes meanwhile; false if `finish` follows at once.
        """
        if self._group.size == 1:
            own = [(None, [place], array.reshape(-1)) for place, array in enumerate(arrays)]
            return PendingSum(own, [array.shape for array in arrays])
        how = [self._compressed(place, array) for place, array in zip(places, arrays, strict=True)]
        kinds: dict[tuple[str, bool], list[int]] = {}
        for place, array in enumerate(arrays):
            kinds.setdefault((array.dtype.name, how[place] is not None), []).append(place)
        pending = []
        for (dtype, compresses), members in kinds.items():
            vector = self._group.take(sum(arrays[member].nbytes for member in members)).view(arrays[members[0]].dtype)
            np.concatenate([arrays[member].reshape(-1) for member in members], out=vector)
            weighted(vector, weight, vector)
            total = self._group.take(vector.nbytes).view(vector.dtype) if compresses else vector
            key = f"{self._name}: {'compressed ' if compresses else ''}{dtype} of variable {places[members[0]]}"
            plan: Plan | Operation
            if compresses:
                chosen = [tensor for tensor in (how[member] for member in members) if tensor is not None]
                plan = compressor.begin(chosen, vector, total, self._group.choose_in_turn)
            else:
                plan = operations.all_reduce(total, self._group.choose(vector.nbytes))
            shapes = ", ".join(f"{arrays[member].dtype.name} {arrays[member].shape}" for member in members)
            contents = ", ".join(self._names[places[member]] for member in members)
            posted = self._group.post(key, plan, shapes, overlaps=overlaps, contents=contents)
            pending.append((posted, members, total))
        return PendingSum(pending, [array.shape for array in arrays])

    def finish(self, begun: PendingSum) -> list[np.ndarray]:
        """Waits for a sum and returns its arrays.

        Args:
            begun: the sum to wait for.
        """
        for pending, _, _ in begun.pending:
            if pending is not None:
                self._group.wait(pending)
        return begun.arrays()

    def _compressed(self, place: int, array: np.ndarray) -> Compressed | None:
        return None if self._compressor is None else self._compressor.tensor(self._keys[place], array)
