"""The calls that a process has posted and not completed: those that wait for a number or a tag, and those that move."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from tfdist.comm.communicator import Communicator
from tfdist.comm.group import GroupCommunicator
from tfdist.engine.call_numbers import CallNumbers
from tfdist.engine.pending import Pending, Site
from tfdist.engine.statistics import Statistics
from tfdist.engine.timeline import EventRecorder
from tfdist.errors import MismatchError, TfdistError

_TAGS_OF_A_KEY = 4
"""Number of calls of one key that can move at once, each with its own tag; later calls wait in the queue."""


class CallsUnderWay:
    """The calls under way of one engine. Its methods may be called by several threads.

    Args:
        communicator: communicator of the engine.
        numbers: numbers of call sites.
        statistics: statistics of the engine.
        tags: number of available message tags.
        started: function that is called with each call that starts.

    Attributes:
        timeline: record of all collectives; None if none is wanted.
    """

    def __init__(
        self,
        communicator: Communicator,
        numbers: CallNumbers,
        statistics: Statistics,
        tags: int,
        started: Callable[[Pending], None],
    ) -> None:
        self.timeline: EventRecorder | None = None
        self._communicators: dict[tuple[int, ...] | None, Communicator] = {None: communicator}
        self._communicator = communicator
        self._numbers = numbers
        self._statistics = statistics
        self._tags = tags
        self._started = started
        self._lock = threading.Lock()
        self._queued: list[Pending] = []
        self._active: list[Pending] = []
        self._abandoned: list[Pending] = []
        self._broken: Pending | None = None  # the call whose transfer broke: until the cause is known, none is moved

    def calls(self) -> list[Pending]:
        """Returns all of them."""
        return [*self._active, *self._queued]

    def can_move(self) -> bool:
        """Returns whether any of them has a number, and so may progress."""
        return bool(self._active) or any(pending.number is not None for pending in self._queued.copy())

    # Beginning.

    def queue(self, pending: Pending) -> None:
        """Adds a call, which `start` or `advance` starts once its site has a number."""
        with self._lock:
            if not self.calls():
                self._statistics.communicating.start()
            self._queued.append(pending)

    def take_number(self, site: Site, number: int) -> None:
        """Numbers the queued calls of a site."""
        for pending in self._queued.copy():
            if (pending.members, pending.key) == site:
                pending.number = number

    def start(self) -> None:
        """Starts every queued call whose key has a number, and whose tag is free."""
        with self._lock, np.errstate(all="ignore"):
            self._start_queued()

    def _start_queued(self) -> None:
        passed_over: set[Site] = set()  # later calls of these sites wait too, even if a number comes during this loop
        for pending in self._queued.copy():
            site = (pending.members, pending.key)
            if pending.number is None:
                pending.number = self._numbers.of(site)
            tag_is_used = any(
                other.number == pending.number and other.call <= pending.call - _TAGS_OF_A_KEY for other in self._active
            )
            if pending.number is None or tag_is_used or site in passed_over:
                passed_over.add(site)
                continue
            self._queued.remove(pending)
            self._start(pending)

    def _start(self, pending: Pending) -> None:
        assert pending.number is not None
        tag = (pending.number * _TAGS_OF_A_KEY + pending.call % _TAGS_OF_A_KEY) % self._tags
        pending.schedule = pending.operation.plan(self._communicator_of(pending.members), tag)
        self._statistics.begun += 1
        self._active.append(pending)
        if self.timeline:
            self.timeline.posted(pending)
        self._move(pending)
        self._started(pending)

    def _communicator_of(self, members: tuple[int, ...] | None) -> Communicator:
        if members not in self._communicators:
            assert members is not None
            self._communicators[members] = GroupCommunicator(self._communicator, members)
        return self._communicators[members]

    # Making progress.

    def advance(self) -> bool:
        """Polls every transfer once, unless another thread does. Returns whether any of them progressed."""
        if not self._lock.acquire(blocking=False):
            return False
        moved = False
        try:
            with np.errstate(all="ignore"):  # a sum may overflow, as it would on one process
                if self._queued:
                    self._start_queued()
                for pending in self._active.copy():
                    moved |= self._move(pending)
        finally:
            self._lock.release()
        return moved

    def _move(self, pending: Pending) -> bool:
        """Resumes a call if its transfers are complete. Returns whether they are."""
        if self._broken:
            return False
        try:
            if not self._communicator.completed(pending.requests):
                return False
            self._resume(pending)
        except Exception as error:
            self._broken = pending
            if isinstance(error, MismatchError):  # from a transfer, which does not know what it is for
                raise MismatchError(f"{pending.name}: {error}") from None
            raise
        return True

    def _resume(self, pending: Pending) -> None:
        try:
            pending.requests = next(pending.schedule)
        except StopIteration as stop:
            self._active.remove(pending)
            pending.result = stop.value
            pending.requests = ()
            pending.done = True
            self._is_over()
        if self.timeline:
            self.timeline.stepped(pending)

    def _is_over(self) -> None:
        if not self.calls():
            self._statistics.communicating.stop()

    # Ending without a result.

    def withdraw(self, site: Site, error: TfdistError) -> bool:
        """Takes back a queued call if it is the only one; returns whether it has. Its wait raises the error."""
        with self._lock:
            calls = self.calls()
            if [(pending.members, pending.key) for pending in calls] != [site]:
                return False
            self._queued.remove(calls[0])
            self._numbers.withdraw(site)
            calls[0].error = error
            self._is_over()
            return True

    def abandon(self, rank: int, error: TfdistError) -> None:
        """Gives up the calls that need a rank. Their waits raise the error."""
        with self._lock:
            for pending in self.calls():
                if pending.members is None or rank in pending.members:
                    pending.error = error
                    (self._active if pending in self._active else self._queued).remove(pending)
                    self._abandoned.append(pending)  # keeps its buffers, into which other ranks' data may still come
            if self._abandoned:
                self._is_over()

    def has_abandoned_broken(self) -> bool:
        """Returns whether the call whose transfer broke has been given up; from then on the others go on."""
        if self._broken is None or self._broken.error is None:
            return False
        self._broken = None
        return True
