"""The course of the gossip of one optimizer's weights: rounds at intervals of steps, and the mean at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.engine.group import ProcessGroup
from tfdist.gossip.mixing import Mixing
from tfdist.local_sgd.course import Course, Courses, Progress, RoundResult, StopRequests, Turn, VariableGroup
from tfdist.local_sgd.exchanges import Attendance, Exchanges
from tfdist.local_sgd.intervals import Interval


class Gossip(Course):
    """The course of the rounds of one optimizer's weights.

    When all processes have taken their steps, as at the end of an epoch, all continue with the mean of those that have
    taken any.

    Args:
        mixing: mixing with the neighbours; None for a process alone.
        everyone: exchanges with all processes.
        size: number of processes.
        interval: number of steps between rounds.
        trained: the variables that are exchanged.
        wishes: requests to stop, which neighbours are told; by default there are none.
    """

    turns = 1

    def __init__(
        self,
        mixing: Mixing | None,
        everyone: Exchanges,
        size: int,
        interval: Interval,
        trained: VariableGroup,
        wishes: StopRequests | None = None,
    ) -> None:
        self.centre = trained.centre
        self._mixing, self._everyone, self._size = mixing, everyone, size
        self._interval = interval
        self._wishes = wishes or StopRequests()
        if mixing is not None:
            mixing.wishes = self._wishes
        self.learning_rate = trained.learning_rate
        self._last = Progress(0, 0)

    @property
    def staleness(self) -> Counter[int]:
        """How often weights of each age, in rounds, have been mixed in."""
        return Counter() if self._mixing is None else self._mixing.staleness

    def places(self, what: int) -> list[int]:
        """Returns the indices of all weights; see `Course`."""
        return list(range(len(self.centre)))

    def begin_anew(self, progress: Progress) -> Turn:
        """Begins the rounds anew; see `Course`."""
        self._last = progress
        if self._mixing is not None:
            self._mixing.begin(list(self.centre))
        return self.first(progress.step)

    def first(self, step: int) -> Turn:
        """Returns the first round's distance; see `Course`."""
        return Turn(self._interval.steps(step, self.learning_rate), 0)

    def take(
        self, what: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Mixes the weights with those of neighbours; see `Course`."""
        self.learning_rate = learning_rate
        new = [np.array(value) for value in values] if self._mixing is None else self._mixing.mix(values)
        if wishes := self._wishes.own():
            self._wishes.learn(wishes)  # the neighbours learn it as this process ends its steps
        return self.first(progress.step), new

    def settle(self, progress: Progress, values: Sequence[np.ndarray]) -> RoundResult:
        """Gives all processes the mean of their weights, and measures `distance`; see `Course`."""
        new = list(values) if self._mixing is None else self._mixing.finish(values)
        samples, steps = progress.samples - self._last.samples, progress.step - self._last.step
        has_trained = samples > 0  # a step may find that there is no batch left
        attendance = Attendance(samples, steps, 1, int(has_trained))
        together = self._everyone.attend(attendance)
        if together.steps:
            weight = has_trained / together.average if together.average else 1 / self._size
            begun = self._everyone.begin(range(len(new)), new, weight, overlaps=False)
            mean = self._everyone.finish(begun)
            self._measure(new, mean)
            for place, value in enumerate(mean):
                self.centre[place] = np.array(value)
            new = [np.array(value) for value in mean]
        return RoundResult(self._everyone.furthest(progress.step), new, bool(together.steps))

    def _measure(self, values: Sequence[np.ndarray], mean: Sequence[np.ndarray]) -> None:
        squares = sum(_square(value - other) for value, other in zip(values, mean, strict=True))
        length = math.sqrt(sum(map(_square, mean)))
        away = math.sqrt(self._everyone.total(squares) / self._size)
        self.distance = away / length if length else away

    def assigned(self, place: int, value: np.ndarray, progress: Progress) -> None:
        """Replaces a value in the centre, and notifies the mixing; see `Course`."""
        self.centre[place] = np.array(value)
        if self._mixing is not None:
            self._mixing.assigned(place)


class Gossiping(Courses):
    """Makes the `Gossip` of each optimizer.

    Args:
        group: the processes.
        interval: number of steps between rounds.
        mixing: makes the mixing of an optimizer's weights, in a group of several processes.
        described: description of the strategy's arguments, which must be the same on all processes.
    """

    def __init__(
        self, group: ProcessGroup, interval: Interval, mixing: Callable[[VariableGroup], Mixing], described: str
    ) -> None:
        self.described = described
        self._group, self._interval, self._mixing = group, interval, mixing

    def of(self, trained: VariableGroup) -> Gossip:
        """Returns the gossip of an optimizer; see `Courses`."""
        mixing = self._mixing(trained) if self._group.size > 1 else None
        everyone = Exchanges(self._group, f"all of {trained.name}", trained.paths)
        return Gossip(mixing, everyone, self._group.size, self._interval, trained, self.wishes)


def _square(array: np.ndarray) -> float:
    flat = array.reshape(-1).astype(np.float64, copy=False)
    return float(flat @ flat)
