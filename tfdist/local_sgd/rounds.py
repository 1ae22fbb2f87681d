"""The course of the rounds of one optimizer, on the host.

The fragments of its variables are exchanged in turn, at equal intervals of steps, each once in a round. With a delay,
the exchange of a fragment is under way for some steps, after which its result is used.

Exchanges are numbered. The number of an exchange selects the fragment, not the step, because processes may have taken
different numbers of steps. A process whose data have ended takes part in the exchanges of the others, without samples,
until all have ended. Then all exchange every fragment once more, and have equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfdist.compression.compressor import Compressor
from tfdist.engine.group import ProcessGroup
from tfdist.local_sgd.course import Course, Courses, Progress, RoundResult, StopRequests, Turn, VariableGroup
from tfdist.local_sgd.exchanges import Attendance, Exchanges, PendingSum
from tfdist.local_sgd.fragments import strided
from tfdist.local_sgd.intervals import Interval
from tfdist.local_sgd.rules import Rule, restore


@dataclass(frozen=True)
class Settings:
    """Settings of the rounds.

    Attributes:
        interval: number of steps of a round.
        rule: makes the rule of a fragment.
        fragments: number of fragments.
        delay: number of steps for which an exchange is under way.
        start_after: number of steps at the start after each of which all weights and slots are averaged.
        averages_slots: whether rounds average the optimizer's slots too; only with one fragment and no delay.
    """

    interval: Interval
    rule: Callable[[], Rule]
    fragments: int = 1
    delay: int = 0
    start_after: int = 0
    averages_slots: bool = False


@dataclass
class _Fragment:
    """A part of the variables that is exchanged at once.

    Attributes:
        places: indices of the variables.
        rule: rule that combines the variables' values.
        last: progress of this process at the last exchange.
    """

    places: list[int]
    rule: Rule
    last: Progress = field(default_factory=lambda: Progress(0, 0))


class Rounds(Course):
    """The course of the rounds of one optimizer's variables.

    Its actions are the exchange of each fragment, or, with a delay, its beginning and its end; and averaging
    everything.

    Args:
        exchanges: exchanges of differences with the other processes.
        plain: exchanges without compression.
        size: number of processes.
        centre: values that the variables have in common on all processes; initially their own values.
        slots: number of optimizer slots that are exchanged.
        settings: settings of the rounds.
        learning_rate: current learning rate of the optimizer.
        wishes: requests to stop, which are sent along with the exchanges; by default there are none.

    Attributes:
        fragments: number of fragments. An action with a number below this exchanges a fragment, or begins to.
        everything: number of the action that averages everything. With a delay, the actions before it end exchanges.

    Raises:
        ValueError: there are more fragments than variables.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        plain: Exchanges,
        size: int,
        centre: MutableSequence[np.ndarray],
        slots: int,
        settings: Settings,
        learning_rate: float,
        wishes: StopRequests | None = None,
    ) -> None:
        self._exchanges, self._plain = exchanges, plain
        self._wishes = wishes or StopRequests()
        self._size = size
        self._settings = settings
        parts = strided([value.nbytes for value in centre], settings.fragments)
        self._fragments = [_Fragment(places, settings.rule()) for places in parts]
        self.fragments = len(parts)
        self.everything = len(parts) * (2 if settings.delay else 1)
        self.turns = self.everything + (1 if settings.start_after else 0)
        self.centre = centre
        self._assigned: dict[int, int] = {}  # by index, the step of an assignment since the last exchange
        self._slots = list(range(len(centre), len(centre) + slots))
        self.learning_rate = learning_rate
        self._next = 0
        self._under_way: tuple[_Fragment, PendingSum | None] | None = None

    @property
    def rules(self) -> list[tuple[Rule, list[np.ndarray]]]:
        """The rule of each fragment, with its values in the centre."""
        return [(fragment.rule, [self.centre[place] for place in fragment.places]) for fragment in self._fragments]

    def places(self, what: int) -> list[int]:
        """Returns the indices of a fragment's values, or of all values; see `Course`."""
        if what == self.everything:
            return [*range(len(self.centre)), *self._slots]
        fragment = self._fragments[what % self.fragments]
        return [*fragment.places, *self._slots] if self._settings.averages_slots else fragment.places

    def assigned(self, place: int, value: np.ndarray, progress: Progress) -> None:
        """Replaces a value in the centre; see `Course`."""
        self.centre[place] = np.array(value)
        self._assigned[place] = progress.step
        for fragment in self._fragments:  # a fragment that is assigned as a whole has nothing to exchange
            if place in fragment.places and all(
                self._assigned.get(index) == progress.step for index in fragment.places
            ):
                fragment.last = progress

    def begin_anew(self, progress: Progress) -> Turn:
        """Begins a round of all fragments; see `Course`."""
        for fragment in self._fragments:
            fragment.last = progress
        return self.first(progress.step)

    def first(self, step: int) -> Turn:
        """Returns the next action at the beginning of a round, or after an exchange; see `Course`."""
        if step < self._settings.start_after:
            return Turn(1, self.everything)
        return Turn(self._spacing(step), self._next)

    def _spacing(self, step: int) -> int:
        """Returns the number of steps between the beginnings of two exchanges."""
        return max(1, self._settings.interval.steps(step, self.learning_rate) // self.fragments)

    # In the steps of training.

    def replaces(self, what: int) -> bool:
        """Returns False for an action that only begins an exchange."""
        return not self._settings.delay or what >= self.fragments

    def take(
        self, what: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Exchanges a fragment, begins or ends its exchange, or averages everything; see `Course`."""
        if what == self.everything:
            return self.average(progress, learning_rate, values)
        if not self._settings.delay:
            return self.exchange(what, progress, learning_rate, values)
        if what < self.fragments:
            return self.begin(what, progress, learning_rate, values), []
        return self.end(progress, values)

    def exchange(
        self, number: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Exchanges a fragment, and waits for the result.

        Args:
            number: number of the fragment.
            progress: progress of this process.
            learning_rate: current learning rate of the optimizer.
            values: values at the indices that `places` returns.

        Returns:
            The next action, and the new values.
        """
        self.learning_rate = learning_rate
        fragment = self._fragments[number]
        together = self._attend(fragment, progress)
        self._next = (number + 1) % self.fragments
        return self.first(progress.step), self._exchanged(fragment, progress, together, values)

    def begin(self, number: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]) -> Turn:
        """Begins the exchange of a fragment, with the arguments of `exchange`; returns the next action."""
        self.learning_rate = learning_rate
        fragment = self._fragments[number]
        together = self._attend(fragment, progress)
        self._under_way = fragment, self._begun(fragment, progress, together, values, overlaps=True)
        self._next = (number + 1) % self.fragments
        return Turn(min(self._settings.delay, self._spacing(progress.step)), self.fragments + number)

    def end(self, progress: Progress, values: Sequence[np.ndarray]) -> tuple[Turn, list[np.ndarray]]:
        """Ends the exchange that is under way.

        Args:
            progress: progress of this process.
            values: current values at the indices that `places` returns.

        Returns:
            The next action, and the new values.
        """
        turn = self.first(progress.step)
        return Turn(max(1, turn.left - self._settings.delay), turn.what), self._ended(values)

    def average(
        self, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Averages everything; returns the next action and the new values, like `exchange`."""
        self.learning_rate = learning_rate
        together = self._attend(self._fragments[self._next], progress, averages=True)
        return self.first(progress.step), self._averaged(progress, together, values)

    # Between epochs.

    def settle(self, progress: Progress, values: Sequence[np.ndarray]) -> RoundResult:
        """Takes part in exchanges until all processes have ended and have equal weights; see `Course`."""
        changes = self._under_way is not None
        new = list(values)

        def assign(places: Iterable[int], results: Iterable[np.ndarray]) -> None:
            for place, value in zip(places, results, strict=True):
                new[place] = value

        if self._under_way is not None:
            places = self._under_way[0].places
            assign(places, self._ended([new[place] for place in places]))
        left = self.fragments
        while left:
            fragment = self._fragments[self._next]
            together = self._attend(fragment, progress, ended=True)
            left = self.fragments if together.ended < self._size else left - 1
            changes |= bool(together.average or together.steps)
            if together.average:
                new = self._averaged(progress, together, new)
                continue
            if together.steps:
                places = self.places(self._next)
                current = [new[place] for place in places]
                assign(places, self._exchanged(fragment, progress, together, current))
            self._next = (self._next + 1) % self.fragments
        self._next = 0
        return RoundResult(self._plain.furthest(progress.step), new, changes)

    # An exchange.

    def _attend(
        self, fragment: _Fragment, progress: Progress, ended: bool = False, averages: bool = False
    ) -> Attendance:
        samples, steps = progress.samples - fragment.last.samples, progress.step - fragment.last.step
        attendance = Attendance(samples, steps, int(ended), int(averages), self._wishes.own())
        together = self._plain.attend(attendance)
        self._wishes.learn(together.wishes)
        return together

    def _weight(self, fragment: _Fragment, progress: Progress, together: Attendance) -> float:
        """Returns this process's fraction of the samples since the last exchange; an equal share if there are none."""
        samples = progress.samples - fragment.last.samples
        return samples / together.samples if together.samples else 1 / self._size

    def _begun(
        self,
        fragment: _Fragment,
        progress: Progress,
        together: Attendance,
        values: Sequence[np.ndarray],
        overlaps: bool,
    ) -> PendingSum | None:
        weight = self._weight(fragment, progress, together)
        fragment.last = progress
        if not together.steps:
            return None
        for place in fragment.places:
            self._assigned.pop(place, None)
        changes = [np.asarray(x - self.centre[place]) for place, x in zip(fragment.places, values, strict=False)]
        return self._exchanges.begin(fragment.places, changes, weight, overlaps=overlaps)

    def _ended(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        assert self._under_way is not None
        (fragment, begun), self._under_way = self._under_way, None
        if begun is None:
            return [np.array(value) for value in values]
        before = [self.centre[place] for place in fragment.places]
        centre = fragment.rule.centre(before, self._exchanges.finish(begun))
        weights = fragment.rule.own(values, before, centre)
        for index, place in enumerate(fragment.places):
            if place in self._assigned:  # during the exchange, which was of the value before the assignment
                weights[index] = np.array(values[index])
            else:
                self.centre[place] = np.asarray(centre[index])
        return [np.asarray(array) for array in weights]

    def _exchanged(
        self,
        fragment: _Fragment,
        progress: Progress,
        together: Attendance,
        values: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        parameters, slots = values[: len(fragment.places)], values[len(fragment.places) :]
        weight = self._weight(fragment, progress, together)
        self._under_way = fragment, self._begun(fragment, progress, together, parameters, overlaps=False)
        averaged = self._plain.begin(self._slots, slots, weight, overlaps=False) if slots else None
        new = self._ended(parameters)
        return new if averaged is None else [*new, *self._plain.finish(averaged)]

    def _averaged(self, progress: Progress, together: Attendance, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        weight = self._weight(self._fragments[self._next], progress, together)
        for fragment in self._fragments:
            fragment.last = progress
        begun = self._plain.begin(range(len(values)), values, weight, overlaps=False)
        means = [np.array(mean) for mean in self._plain.finish(begun)]
        for place in range(len(self.centre)):
            self.centre[place] = means[place].copy()
        return means


class LocalSGD(Courses):
    """Makes the `Rounds` of each optimizer.

    Args:
        group: the processes.
        settings: settings of the rounds.
        compressor: compressor of the differences; None for no compression.
        described: description of the strategy's arguments, which must be the same on all processes.
    """

    def __init__(self, group: ProcessGroup, settings: Settings, compressor: Compressor | None, described: str) -> None:
        self._group, self._settings = group, settings
        self.compressor = compressor
        self.described = described
        self.with_slots = settings.averages_slots or settings.start_after > 0

    def of(self, trained: VariableGroup) -> Rounds:
        """Returns the rounds of an optimizer; see `Courses`."""
        name, paths, centre = trained.name, trained.paths, trained.centre
        exchanges = Exchanges(self._group, name, paths, self.compressor, trained.keys)
        plain = Exchanges(self._group, f"all of {name}", paths)
        if self.compressor is not None:
            shapes = [(paths[place], value.shape) for place, value in enumerate(centre)]
            self.compressor.register(dict(zip(trained.keys, shapes, strict=True)))
        slots = len(paths) - len(centre)
        how = slots, self._settings, trained.learning_rate, self.wishes
        rounds = Rounds(exchanges, plain, self._group.size, centre, *how)
        restore(rounds.rules, trained.rules)
        return rounds
