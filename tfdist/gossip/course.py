"""The course of the gossip of one optimizer's weights: rounds every so many steps, and the mean at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.engine.group import Group
from tfdist.gossip.mixing import Mixing
from tfdist.local_sgd.course import Course, Courses, Progress, Settled, Trained, Turn, Wishes
from tfdist.local_sgd.exchanges import Alone, Attendance, Exchanges
from tfdist.local_sgd.intervals import Interval


class Gossip(Course):
    """The rounds of the weights of one optimizer.

    When all processes have taken their steps, as at the end of an epoch, all go on with the mean of those that have
    taken any.

    Args:
        mixing: with the neighbours; None for a process alone.
        everyone: exchanges with all processes.
        size: how many there are.
        interval: steps between rounds.
        trained: what is trained.
        wishes: that go along with what neighbours are told.
    """

    turns = 1

    def __init__(
        self,
        mixing: Mixing | None,
        everyone: Exchanges | Alone,
        size: int,
        interval: Interval,
        trained: Trained,
        wishes: Wishes | None = None,
    ) -> None:
        self.centre = trained.centre
        self._mixing, self._everyone, self._size = mixing, everyone, size
        self._interval = interval
        self._wishes = wishes or Wishes()
        if mixing is not None:
            mixing.wishes = self._wishes
        self._learning_rate = trained.learning_rate
        self._last = Progress(0, 0)

    @property
    def staleness(self) -> Counter[int]:
        """See `Course`."""
        return Counter() if self._mixing is None else self._mixing.staleness

    def places(self, what: int) -> list[int]:
        """See `Course`."""
        return list(range(len(self.centre)))

    def begin_anew(self, progress: Progress) -> Turn:
        """See `Course`."""
        self._last = progress
        if self._mixing is not None:
            self._mixing.begin(list(self.centre))
        return self._next(progress.step)

    def _next(self, step: int) -> Turn:
        return Turn(self._interval.steps(step, self._learning_rate), 0)

    def take(
        self, what: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """See `Course`."""
        self._learning_rate = learning_rate
        new = [np.array(value) for value in values] if self._mixing is None else self._mixing.mix(values)
        if wishes := self._wishes.own():
            self._wishes.learn(wishes)  # the neighbours learn it as this process ends its steps
        return self._next(progress.step), new

    def settle(self, progress: Progress, values: Sequence[np.ndarray]) -> Settled:
        """See `Course`."""
        new = list(values) if self._mixing is None else self._mixing.finish(values)
        samples, steps = progress.samples - self._last.samples, progress.step - self._last.step
        has_trained = samples > 0  # a step may find that there is no batch left
        own = Attendance(samples, steps, 1, int(has_trained))
        together = self._everyone.attend(own, blocking=True)
        if together.steps:
            weight = has_trained / together.average if together.average else 1 / self._size
            mean = self._everyone.finish(self._everyone.begin(range(len(new)), new, weight), blocking=True)
            self._measure(new, mean)
            for place, value in enumerate(mean):
                self.centre[place] = np.array(value)
            new = [np.array(value) for value in mean]
        return Settled(self._everyone.furthest(progress.step), new, bool(together.steps))

    def _measure(self, own: Sequence[np.ndarray], mean: Sequence[np.ndarray]) -> None:
        squares = sum(_square(one - other) for one, other in zip(own, mean, strict=True))
        length = math.sqrt(sum(map(_square, mean)))
        away = math.sqrt(self._everyone.total(squares) / self._size)
        self.distance = away / length if length else away

    def assigned(self, place: int, value: np.ndarray, progress: Progress) -> None:
        """See `Course`."""
        self.centre[place] = np.array(value)
        if self._mixing is not None:
            self._mixing.assigned(place)


class Gossiping(Courses):
    """Makes `Gossip`.

    Args:
        group: the processes.
        interval: steps between rounds.
        mixing: makes what mixes the weights of an optimizer, in a group of several.
        described: as of `Courses`.
    """

    def __init__(self, group: Group, interval: Interval, mixing: Callable[[Trained], Mixing], described: str) -> None:
        self.described = described
        self._group, self._interval, self._mixing = group, interval, mixing

    def of(self, trained: Trained) -> Gossip:
        """See `Courses`."""
        if self._group.size == 1:
            return Gossip(None, Alone(), 1, self._interval, trained, self.wishes)
        everyone = Exchanges(self._group, f"all of {trained.name}", trained.paths)
        return Gossip(self._mixing(trained), everyone, self._group.size, self._interval, trained, self.wishes)


def _square(array: np.ndarray) -> float:
    flat = array.reshape(-1).astype(np.float64, copy=False)
    return float(flat @ flat)
