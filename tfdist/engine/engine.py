"""Drives many collectives at once, each under a key that all ranks know it by.

Ranks do not run their collectives in one order: TensorFlow's executor starts what is ready. So a call site has a
key, and every call of it a sequence number; together they make the message tag. The first time a key is used,
the ranks agree on its number through the rendezvous server, which finds out when they disagree.

Whoever waits drives: it polls the transfers of all collectives, briefly at full speed and then in naps that
leave the core to the peer it waits for. While nobody waits, a thread does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfdist.cluster.control import Control
from tfdist.cluster.settings import Timeouts
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator, Request
from tfdist.errors import CollectiveTimeoutError, PeerLostError, TfdistError

_SPIN_SECONDS = 2e-3
_SHORTEST_NAP = 20e-6
_LONGEST_NAP = 1e-3
_EXPLANATION_SECONDS = 3.0
_CALLS_IN_FLIGHT = 4
"""Calls of one key that can be under way at once and keep tags of their own."""


class Pending:
    """A collective under way.

    Attributes:
        key: of its call site.
        call: how many calls of that key came before it.
        done: whether it is complete, on this rank.
        result: what it gave, once done.
    """

    def __init__(self, key: str, number: int, call: int, schedule: Schedule) -> None:
        self.key = key
        self.number = number
        self.call = call
        self.done = False
        self.result: Any = None
        self.schedule = schedule
        self.requests: Sequence[Request] = ()


class Engine:
    """The one place where a process's collectives make progress.

    Args:
        communicator: used by nobody else.
        control: agrees on keys, and knows when a rank is lost. None in a world of threads.
        timeouts: how long to wait.
        tags: how many message tags there are.
    """

    def __init__(
        self, communicator: Communicator, control: Control | None, timeouts: Timeouts, tags: int = 1 << 15
    ) -> None:
        self.communicator = communicator
        self.collectives = 0
        self._control = control
        self._timeouts = timeouts
        self._tags = tags
        self._numbers: dict[str, int] = {}
        self._agreeing: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._calls: defaultdict[int, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._active: list[Pending] = []
        self._failure: TfdistError | None = None
        self._waiters = 0
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.communicator.size

    @property
    def failure(self) -> TfdistError | None:
        """Why no collective can complete any more, if that is so."""
        return self._failure

    def run(self, key: str, plan: Plan, signature: str = "") -> Any:
        """Runs a collective to its end, from ordinary (eager) code; see `post` and `wait`.

        Raises:
            TfdistError: a rank is lost, took part with other data, or did not come in time.
        """
        pending = self._post(key, plan, signature, blocking=True)
        with self._waiting():
            return self._wait(pending)

    def post(self, key: str, plan: Plan, signature: str = "", blocking: bool = False, overlaps: bool = True) -> Pending:
        """Begins a collective and returns at once.

        Args:
            key: names the call site; the same on every rank.
            plan: what to do, with buffers that stay untouched until it is done.
            signature: what must be equal on all ranks (shapes, dtypes); compared when the key is new.
            blocking: whether this process does nothing else until all ranks know the key; lets the rendezvous
                server tell a deadlock from a delay.
            overlaps: whether it should move although nobody waits yet; false where the wait follows at once.

        Raises:
            TfdistError: as `run`.
        """
        pending = self._post(key, plan, signature, blocking)
        if not overlaps:
            return pending
        with self._work:
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="tfdist-progress", daemon=True)
                self._thread.start()
            self._work.notify()
        return pending

    def wait(self, pending: Pending) -> Any:
        """Waits for a collective to complete and returns its result.

        Raises:
            TfdistError: as `run`.
        """
        with self._waiting():
            return self._wait(pending)

    def counts(self) -> dict[str, int]:
        """How many calls this rank has begun, by the key's number: what a leaving task tells the others."""
        return {str(number): calls for number, calls in self._calls.items()}

    def fail(self, error: TfdistError) -> None:
        """Makes every wait, now and later, raise the error."""
        if self._failure is None:
            self._failure = error

    def close(self) -> None:
        """Ends the progress thread."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        if self._thread:
            self._thread.join(5.0)

    # Beginning.

    def _post(self, key: str, plan: Plan, signature: str, blocking: bool) -> Pending:
        if self._failure:
            raise self._failure
        number = self._number(key, signature, blocking)
        self._make_room(number)
        with self._lock:
            call = self._calls[number]
            self._calls[number] += 1
            tag = (number * _CALLS_IN_FLIGHT + call % _CALLS_IN_FLIGHT) % self._tags
            pending = Pending(key, number, call, plan(self.communicator, tag))
            self._active.append(pending)
            self.collectives += 1
            try:
                self._resume(pending)
            except Exception as error:
                raise self._broken(error) from error
        return pending

    def _make_room(self, number: int) -> None:
        """Waits until a call of this key has a tag that none of those under way uses."""
        with self._lock:
            following = self._calls[number]
            same_tag = [
                pending
                for pending in self._active
                if pending.number == number and pending.call <= following - _CALLS_IN_FLIGHT
            ]
        for pending in same_tag:
            with self._waiting():
                self._wait(pending)

    def _number(self, key: str, signature: str, blocking: bool) -> int:
        if (number := self._numbers.get(key)) is not None:
            return number
        if self._control is None:
            raise ValueError(f"the key {key!r} is unknown, and there is nobody to agree on it with")
        with self._agreeing[key]:  # a key that two threads use for the first time is asked for once
            if key not in self._numbers:
                answer = self._control.request(
                    "agree", self._timeouts.collective, key=key, signature=signature, blocking=blocking
                )
                self._numbers[key] = answer["number"]
            return self._numbers[key]

    # Making progress.

    def _advance(self) -> bool:
        """Polls every active collective once; whether any of them moved."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            moved = False
            for pending in list(self._active):
                if self.communicator.completed(pending.requests):
                    moved = True
                    self._resume(pending)
            return moved
        except Exception as error:
            raise self._broken(error) from error
        finally:
            self._lock.release()

    def _resume(self, pending: Pending) -> None:
        try:
            with np.errstate(all="ignore"):  # a sum may overflow, as it would on one process
                pending.requests = next(pending.schedule)
        except StopIteration as stop:
            self._active.remove(pending)
            pending.result = stop.value
            pending.requests = ()
            pending.done = True

    def _broken(self, error: Exception) -> TfdistError:
        """Whose fault a broken transfer is: the rendezvous server usually knows a moment later."""
        end = time.monotonic() + _EXPLANATION_SECONDS
        while self._control and not self._control.failure and time.monotonic() < end:
            time.sleep(0.01)
        explanation = self._control.failure if self._control else None
        self.fail(
            explanation
            or PeerLostError(
                f"rank {self.rank}: a transfer broke and no rank has said why ({type(error).__name__}: {error}). "
                "If ranks pass data of different sizes, make them equal; if a link broke, start the job again."
            )
        )
        assert self._failure
        return self._failure

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._work:
            self._waiters += 1
        try:
            yield
        finally:
            with self._work:
                self._waiters -= 1
                if self._active:
                    self._work.notify()

    def _wait(self, pending: Pending) -> Any:
        begin = time.monotonic()
        spin_until, nap = time.perf_counter() + _SPIN_SECONDS, _SHORTEST_NAP
        while not pending.done:
            if self._advance():
                spin_until, nap = time.perf_counter() + _SPIN_SECONDS, _SHORTEST_NAP
            elif time.perf_counter() < spin_until:
                os.sched_yield()
            else:
                self._check(pending, begin)
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
        return pending.result

    def _check(self, pending: Pending, begin: float) -> None:
        if self._failure:
            raise self._failure
        control = self._control
        if control is None:
            return
        if control.failure:
            self.fail(control.failure)
            raise control.failure
        for rank, counts in list(control.departed.items()):
            if counts.get(str(pending.number), 0) <= pending.call:
                error = PeerLostError(
                    f"rank {self.rank} waits in {pending.key} (call {pending.call + 1}), but "
                    f"{control.names[rank]} has ended its script without it. Every rank must take the same steps."
                )
                self.fail(error)
                raise error
        if time.monotonic() - begin > self._timeouts.collective:
            late = CollectiveTimeoutError(
                f"rank {self.rank} waited {self._timeouts.collective:g} s in {pending.key} (call {pending.call + 1}) "
                "for ranks that are alive but did not take part. Look at what they do; if they may take that long, "
                "raise TFDIST_COLLECTIVE_TIMEOUT."
            )
            self.fail(late)
            raise late

    def _drive(self) -> None:
        """The progress thread: makes what is posted move while nobody waits."""
        nap = _SHORTEST_NAP
        while True:
            with self._work:
                while not self._closed and (not self._active or self._waiters or self._failure):
                    self._work.wait()
                    nap = _SHORTEST_NAP
                if self._closed:
                    return
            try:
                moved = self._advance()
            except TfdistError:
                continue  # kept as the engine's failure; the next wait raises it
            if moved:
                nap = _SHORTEST_NAP
            else:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)


def describe(arrays: Sequence[np.ndarray]) -> str:
    """Shapes and dtypes, for signatures and messages."""
    return ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
