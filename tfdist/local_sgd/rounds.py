"""The course of the rounds of one optimizer, on the host.

The fragments of its variables are exchanged in turn, equal numbers of steps apart, so that each is exchanged once in a
round. With a delay the exchange of a fragment is under way for some steps, and its result is used after them.

Exchanges are numbered, and the number says which fragment it is, not the step: processes may have taken different
numbers of steps. One whose data have ended takes part in the exchanges of the others, without samples, until all have
ended; then all exchange every fragment once more, and have equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfdist.local_sgd.exchanges import Alone, Attendance, Exchanges, Sum
from tfdist.local_sgd.fragments import strided
from tfdist.local_sgd.intervals import Interval
from tfdist.local_sgd.rules import Rule


@dataclass(frozen=True)
class Settings:
    """What rounds are like.

    Attributes:
        interval: steps of a round.
        rule: makes the rule of a fragment.
        fragments: how many there are.
        delay: steps for which an exchange is under way.
        start_after: steps at the start after each of which all weights and slots are averaged.
        averages_slots: whether rounds average the optimizer's slots too; with one fragment and no delay.
    """

    interval: Interval
    rule: Callable[[], Rule]
    fragments: int = 1
    delay: int = 0
    start_after: int = 0
    averages_slots: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a process has come.

    Attributes:
        samples: that it has trained on.
        step: the number of steps taken.
    """

    samples: int
    step: int


@dataclass(frozen=True)
class Turn:
    """What is to be done next.

    Attributes:
        left: after how many more steps.
        what: the number of a fragment, to exchange it; with a delay to begin that, and this number plus the number of
            fragments to end it. The number after all of these, which is `Rounds.everything`, to average everything.
    """

    left: int
    what: int


class Settled(NamedTuple):
    """The end of a round.

    Attributes:
        step: the number of steps that count as taken, the same for all processes.
        values: of all variables and slots.
        changes: whether a process had something to exchange.
    """

    step: int
    values: list[np.ndarray]
    changes: bool


@dataclass
class _Fragment:
    """A part of the variables.

    Attributes:
        places: of its variables.
        rule: of its exchanges.
        last: the progress at its last exchange.
    """

    places: list[int]
    rule: Rule
    last: Progress = Progress(0, 0)


class Rounds:
    """The rounds of the variables of one optimizer.

    Values are those of its variables, followed by those of its slots.

    Args:
        exchanges: of differences, with the other processes.
        plain: exchanges that compress nothing.
        size: number of the processes.
        centre: what the variables of all processes have in common: at first their values.
        slots: how many slots there are.
        settings: of the rounds.
        learning_rate: of the optimizer, now.

    Attributes:
        centre: as given; its arrays are replaced, not changed.
        fragments: how many there are.
        everything: as of `Turn.what`.

    Raises:
        ValueError: there are more fragments than variables.
    """

    def __init__(
        self,
        exchanges: Exchanges | Alone,
        plain: Exchanges | Alone,
        size: int,
        centre: MutableSequence[np.ndarray],
        slots: int,
        settings: Settings,
        learning_rate: float,
    ) -> None:
        self._exchanges, self._plain = exchanges, plain
        self._size = size
        self._settings = settings
        parts = strided([value.nbytes for value in centre], settings.fragments)
        self._fragments = [_Fragment(places, settings.rule()) for places in parts]
        self.fragments = len(parts)
        self.everything = len(parts) * (2 if settings.delay else 1)
        self.centre = centre
        self._assigned: dict[int, int] = {}  # steps at which values were assigned since their last exchange
        self._slots = list(range(len(centre), len(centre) + slots))
        self._learning_rate = learning_rate
        self._next = 0
        self._under_way: tuple[_Fragment, Sum | None] | None = None

    def places(self, what: int) -> list[int]:
        """The places of the values that a turn is about.

        Args:
            what: as of `Turn`.
        """
        if what == self.everything:
            return [*range(len(self.centre)), *self._slots]
        fragment = self._fragments[what % self.fragments]
        return [*fragment.places, *self._slots] if self._settings.averages_slots else fragment.places

    def assigned(self, place: int, value: np.ndarray, progress: Progress) -> None:
        """Notes that the user's program has assigned a value, equal on all processes, which is then the common one.

        Args:
            place: of the variable.
            value: of it.
            progress: of this process.
        """
        self.centre[place] = np.array(value)
        self._assigned[place] = progress.step
        for fragment in self._fragments:  # one that is assigned as a whole has nothing to exchange
            if place in fragment.places and all(self._assigned.get(one) == progress.step for one in fragment.places):
                fragment.last = progress

    def begin_anew(self, progress: Progress) -> Turn:
        """Begins a round, after `settle` or where none was under way.

        Args:
            progress: of this process; of all the same step.

        Returns:
            What comes next.
        """
        for fragment in self._fragments:
            fragment.last = progress
        return self.first(progress.step)

    def first(self, step: int) -> Turn:
        """The turn after a beginning.

        Args:
            step: how many have been taken.
        """
        if step < self._settings.start_after:
            return Turn(1, self.everything)
        return Turn(self._spacing(step), self._next)

    def _spacing(self, step: int) -> int:
        """Steps between the beginnings of two exchanges."""
        return max(1, self._settings.interval.steps(step, self._learning_rate) // self.fragments)

    # In the steps of training.

    def exchange(
        self, number: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Exchanges a fragment.

        Args:
            number: of the fragment.
            progress: of this process.
            learning_rate: of the optimizer.
            values: at `places`.

        Returns:
            What comes next, and the new values.
        """
        self._learning_rate = learning_rate
        fragment = self._fragments[number]
        together = self._attend(fragment, progress)
        self._next = (number + 1) % self.fragments
        return self.first(progress.step), self._exchanged(fragment, progress, together, values)

    def begin(self, number: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]) -> Turn:
        """Begins the exchange of a fragment, as `exchange`; returns what comes next."""
        self._learning_rate = learning_rate
        fragment = self._fragments[number]
        together = self._attend(fragment, progress)
        self._under_way = fragment, self._begun(fragment, progress, together, values)
        self._next = (number + 1) % self.fragments
        return Turn(min(self._settings.delay, self._spacing(progress.step)), self.fragments + number)

    def end(self, progress: Progress, values: Sequence[np.ndarray]) -> tuple[Turn, list[np.ndarray]]:
        """Ends the exchange that is under way.

        Args:
            progress: of this process.
            values: at `places`, now.

        Returns:
            As `exchange`.
        """
        turn = self.first(progress.step)
        return Turn(max(1, turn.left - self._settings.delay), turn.what), self._ended(values, blocking=False)

    def average(
        self, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Averages everything; as `exchange`."""
        self._learning_rate = learning_rate
        together = self._attend(self._fragments[self._next], progress, averages=True)
        return self.first(progress.step), self._averaged(progress, together, values, blocking=False)

    # Between epochs.

    def settle(self, progress: Progress, values: Sequence[np.ndarray]) -> Settled:
        """Ends the round once all processes have taken their steps; all call it.

        Args:
            progress: of this process.
            values: all of them.

        Returns:
            What comes of it. If anything has changed, the variables are to become `centre`; `begin_anew` is to follow.
        """
        changes = self._under_way is not None
        new = list(values)

        def assign(places: Iterable[int], found: Iterable[np.ndarray]) -> None:
            for place, value in zip(places, found, strict=True):
                new[place] = value

        if self._under_way is not None:
            places = self._under_way[0].places
            assign(places, self._ended([new[place] for place in places], blocking=True))
        left = self.fragments
        while left:
            fragment = self._fragments[self._next]
            together = self._attend(fragment, progress, ended=True)
            left = self.fragments if together.ended < self._size else left - 1
            changes |= bool(together.average or together.steps)
            if together.average:
                new = self._averaged(progress, together, new, blocking=True)
                continue
            if together.steps:
                places = self.places(self._next)
                own = [new[place] for place in places]
                assign(places, self._exchanged(fragment, progress, together, own, blocking=True))
            self._next = (self._next + 1) % self.fragments
        self._next = 0
        return Settled(self._plain.furthest(progress.step), new, changes)

    # An exchange.

    def _attend(
        self, fragment: _Fragment, progress: Progress, ended: bool = False, averages: bool = False
    ) -> Attendance:
        samples, steps = progress.samples - fragment.last.samples, progress.step - fragment.last.step
        return self._plain.attend(Attendance(samples, steps, int(ended), int(averages)), blocking=ended)

    def _weight(self, fragment: _Fragment, progress: Progress, together: Attendance) -> float:
        """This process's part of the samples since the last exchange."""
        samples = progress.samples - fragment.last.samples
        return samples / together.samples if together.samples else 1 / self._size

    def _begun(
        self, fragment: _Fragment, progress: Progress, together: Attendance, values: Sequence[np.ndarray]
    ) -> Sum | None:
        weight = self._weight(fragment, progress, together)
        fragment.last = progress
        if not together.steps:
            return None
        for place in fragment.places:
            self._assigned.pop(place, None)
        changes = [np.asarray(x - self.centre[place]) for place, x in zip(fragment.places, values, strict=False)]
        return self._exchanges.begin(fragment.places, changes, weight)

    def _ended(self, values: Sequence[np.ndarray], blocking: bool) -> list[np.ndarray]:
        assert self._under_way is not None
        (fragment, begun), self._under_way = self._under_way, None
        if begun is None:
            return [np.array(value) for value in values]
        before = [self.centre[place] for place in fragment.places]
        centre = fragment.rule.centre(before, self._exchanges.finish(begun, blocking))
        own = fragment.rule.own(values, before, centre)
        for index, place in enumerate(fragment.places):
            if place in self._assigned:  # while the exchange was under way, which was of what has been replaced
                own[index] = np.array(values[index])
            else:
                self.centre[place] = np.asarray(centre[index])
        return [np.asarray(one) for one in own]

    def _exchanged(
        self,
        fragment: _Fragment,
        progress: Progress,
        together: Attendance,
        values: Sequence[np.ndarray],
        blocking: bool = False,
    ) -> list[np.ndarray]:
        own, slots = values[: len(fragment.places)], values[len(fragment.places) :]
        weight = self._weight(fragment, progress, together)
        self._under_way = fragment, self._begun(fragment, progress, together, own)
        averaged = self._plain.begin(self._slots, slots, weight) if slots else None
        new = self._ended(own, blocking)
        return new if averaged is None else [*new, *self._plain.finish(averaged, blocking)]

    def _averaged(
        self, progress: Progress, together: Attendance, values: Sequence[np.ndarray], blocking: bool
    ) -> list[np.ndarray]:
        weight = self._weight(self._fragments[self._next], progress, together)
        for fragment in self._fragments:
            fragment.last = progress
        begun = self._plain.begin(range(len(values)), values, weight)
        found = [np.array(one) for one in self._plain.finish(begun, blocking)]
        for place in range(len(self.centre)):
            self.centre[place] = found[place].copy()
        return found
