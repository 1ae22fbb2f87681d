"""The exchanges that rounds are made of: who takes part and with what weight, and weighted means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.collectives.schedule import Plan
from tfdist.compression import compressor
from tfdist.compression.compressor import Compressed, Compressor
from tfdist.engine import operations
from tfdist.engine.group import Group
from tfdist.engine.operations import Operation
from tfdist.engine.pending import Pending
from tfdist.engine.weights import weighted


class Attendance(NamedTuple):
    """What all processes together bring to an exchange.

    Attributes:
        samples: they have trained on since the variables were exchanged last.
        steps: they have taken since then.
        ended: how many of them have no more steps to take for now.
        average: how many of them are to average everything, which are all but those that have ended, or none.
        wishes: how many of them wish that all take no more steps.
    """

    samples: int
    steps: int
    ended: int
    average: int
    wishes: int = 0


class Sum:
    """A weighted sum that is under way.

    Args:
        pending: its transfers, each with the places of its arrays and with the buffer for their sum.
        shapes: of the arrays.
    """

    def __init__(
        self, pending: Sequence[tuple[Pending | None, list[int], np.ndarray]], shapes: list[tuple[int, ...]]
    ) -> None:
        self.pending = pending
        self._shapes = shapes

    def arrays(self) -> list[np.ndarray]:
        """The sums, once all transfers are complete."""
        found: dict[int, np.ndarray] = {}
        for _, places, buffer in self.pending:
            sizes = [int(np.prod(self._shapes[place])) for place in places]
            for place, part in zip(places, np.split(buffer, np.cumsum(sizes)[:-1]), strict=True):
                found[place] = part.reshape(self._shapes[place])
        return [found[place] for place in range(len(self._shapes))]


class Exchanges:
    """Exchanges between the processes that train the variables of one optimizer.

    Args:
        group: the processes.
        name: of the optimizer, the same on all of them.
        names: of its variables.
        compressor: what compresses their differences; None for nothing.
    """

    def __init__(self, group: Group, name: str, names: Sequence[str], compressor: Compressor | None = None) -> None:
        self._group = group
        self._name = name
        self._names = names
        self._compressor = compressor

    def attend(self, own: Attendance, blocking: bool) -> Attendance:
        """Adds up what all processes bring to the next exchange; all of them call it.

        Args:
            own: of this process.
            blocking: as of `tfdist.engine.engine.Engine.wait`.
        """
        return Attendance(*self._together(np.array(own, np.int64), np.add, "who takes part in a round", blocking))

    def furthest(self, step: int) -> int:
        """The largest number of steps that a process has taken; all call it, while they do nothing else.

        Args:
            step: of this process.
        """
        return self._together(np.array([step], np.int64), np.maximum, "the steps of all", blocking=True)[0]

    def total(self, value: float) -> float:
        """The sum of a number over all processes, which all call it while they do nothing else.

        Args:
            value: this process's.
        """
        return self._together(np.array([value], np.float64), np.add, "a sum", blocking=True)[0]

    def _together(self, own: np.ndarray, combine: np.ufunc, what: str, blocking: bool) -> list[Any]:
        total = self._group.take(own.nbytes).view(own.dtype)
        plan = operations.all_reduce(total, self._group.choose(own.nbytes), combine, own)
        pending = self._group.post(f"{self._name}: {what}", plan, f"{own.dtype.name} {own.shape}", overlaps=False)
        self._group.wait(pending, blocking)
        return total.tolist()

    def begin(self, places: Sequence[int], arrays: Sequence[np.ndarray], weight: float) -> Sum:
        """Begins a sum over all processes, which all of them begin.

        Args:
            places: of the variables.
            arrays: this process's, one for each of the variables; only read.
            weight: of this process. With 0 its arrays count as zero, also if they hold NaN or infinity.
        """
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
                chosen = [one for one in (how[member] for member in members) if one is not None]
                plan = compressor.all_reduce(chosen, vector, total, self._group.choose_in_turn)
            else:
                plan = operations.all_reduce(total, self._group.choose(vector.nbytes))
            shapes = ", ".join(f"{arrays[member].dtype.name} {arrays[member].shape}" for member in members)
            contents = ", ".join(self._names[places[member]] for member in members)
            pending.append((self._group.post(key, plan, shapes, contents=contents), members, total))
        return Sum(pending, [array.shape for array in arrays])

    def finish(self, begun: Sum, blocking: bool) -> list[np.ndarray]:
        """Waits for a sum.

        Args:
            begun: it.
            blocking: as of `tfdist.engine.engine.Engine.wait`.
        """
        for pending, _, _ in begun.pending:
            if pending is not None:
                self._group.wait(pending, blocking)
        return begun.arrays()

    def _compressed(self, place: int, array: np.ndarray) -> Compressed | None:
        return None if self._compressor is None else self._compressor.tensor(f"{self._name} {place}", array)


class Alone:
    """As `Exchanges`, of a process that trains alone."""

    def attend(self, own: Attendance, blocking: bool) -> Attendance:
        """See `Exchanges`."""
        return own

    def furthest(self, step: int) -> int:
        """See `Exchanges`."""
        return step

    def total(self, value: float) -> float:
        """See `Exchanges`."""
        return value

    def begin(self, places: Sequence[int], arrays: Sequence[np.ndarray], weight: float) -> Sum:
        """See `Exchanges`."""
        return Sum(
            [(None, [place], array.reshape(-1)) for place, array in enumerate(arrays)], [a.shape for a in arrays]
        )

    def finish(self, begun: Sum, blocking: bool) -> list[np.ndarray]:
        """See `Exchanges`."""
        return begun.arrays()
