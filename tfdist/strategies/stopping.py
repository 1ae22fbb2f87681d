"""Ending the steps of an epoch on all processes, when one of them wishes to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist.local_sgd.course import Wishes


class Stopping:
    """What a process wishes, and what the processes that take steps together have found in the count of a step.

    The wish is counted with the samples of the next step, which then nobody takes: `fit` ends after the step in which
    ``stop_training`` was set, as in one process. Where processes take steps on their own, it goes along with their next
    exchange, after which nobody takes another step.

    Attributes:
        is_wished: whether this process wishes to end the steps of the `fit` that is under way.
        is_agreed: whether an exchange has told that a process wishes so.
        is_passed_on: whether the count of a step has told so some of the processes, which tell the others in that step.
        is_found: whether the last step of a `fit` was not taken, because a process wished so, until that is acted upon.
    """

    def __init__(self) -> None:
        self.is_wished = self.is_agreed = self.is_passed_on = self.is_found = False
        self._counts = False

    def begin(self) -> None:
        """Begins a `fit`, or another epoch of it: nobody wishes anything."""
        self.is_wished = self.is_agreed = False

    def check(self) -> None:
        """Ends the steps before the next one, if an exchange has told so.

        Raises:
            StopIteration: it has.
        """
        if self.is_agreed:
            self.is_found = True
            raise StopIteration

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Context of a step of `fit`; the wish does not end other loops over data, such as `evaluate`."""
        self.is_found, self.is_passed_on, self._counts = False, False, True
        try:
            yield
        finally:
            self._counts = False

    def own(self) -> int:
        """What this process adds to the count of a step."""
        return int((self.is_wished or self.is_passed_on) and self._counts)

    def pass_on(self, wishes: int) -> None:
        """As `learn`, where those that have counted the step are not all: they tell the others.

        Args:
            wishes: as of `learn`.
        """
        self.is_passed_on = wishes > 0

    def learn(self, wishes: int) -> None:
        """Ends the steps if a process wishes so.

        Args:
            wishes: how many do.

        Raises:
            StopIteration: at least one does.
        """
        if wishes:
            self.is_found = True
            raise StopIteration


class WishesInRounds(Wishes):
    """What of this goes along with the exchanges of processes that take steps on their own.

    Args:
        stopping: of the strategy.
    """

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping

    def own(self) -> int:
        """See `Wishes`."""
        return int(self._stopping.is_wished)

    def learn(self, wishes: int) -> None:
        """See `Wishes`."""
        self._stopping.is_agreed = wishes > 0
