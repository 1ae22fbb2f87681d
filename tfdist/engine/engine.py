"""Drives many collectives at once, each under a key that all of its ranks know.

Ranks do not begin their collectives in the same order: groups overlap, and stages of a pipeline run different graphs.
So a call site has a key, and each of its calls a sequence number; together they make the message tag. The first time
that a group uses a key, its members agree on a number for it through the rendezvous server, which detects
disagreements. A call that is posted before that is queued, and so is a call whose tag an earlier call still uses;
`post` returns at once.

A waiting thread drives the engine: it polls the transfers of all collectives, briefly at full speed and then with naps
that leave the core to the peer that it waits for. While no thread waits, a progress thread drives the engine.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tfdist.cluster.control import Control
from tfdist.cluster.messages import RankStatus, WaitingForCall
from tfdist.cluster.settings import Timeouts
from tfdist.collectives.schedule import Plan
from tfdist.comm.communicator import Communicator
from tfdist.comm.idling import Idling
from tfdist.engine import operations
from tfdist.engine.beside import Beside
from tfdist.engine.call_numbers import CallNumbers
from tfdist.engine.joining import JoinCoordinator
from tfdist.engine.operations import Operation
from tfdist.engine.patience import WaitMonitor
from tfdist.engine.pending import Pending, Site
from tfdist.engine.statistics import Statistics
from tfdist.engine.timeline import EventRecorder
from tfdist.engine.under_way import CallsUnderWay
from tfdist.errors import MismatchError, PeerLostError, TfdistError
from tfdist.thread_values import is_beside_main_thread

_EXPLANATION_SECONDS = 3.0
_PATIENT_NAP = 5e-3
"""Seconds that the progress thread sleeps when all calls are patient. Waking up interrupts computation on its core."""


class Engine:
    """Runs all collectives of a process.

    Args:
        communicator: communicator that only this engine uses.
        control: this task's membership, which agrees on keys and reports lost ranks; None for a process alone.
        timeouts: deadlines for waits.
        tags: number of available message tags.

    Attributes:
        lost: errors of the ranks that are lost while this process goes on, by rank.
        beside: the collectives that run beside the engine.
        numbers: numbers of call sites and calls.
        statistics: number of collectives so far, and time spent in them.
    """

    def __init__(
        self, communicator: Communicator, control: Control | None, timeouts: Timeouts, tags: int = 1 << 15
    ) -> None:
        self.communicator = communicator
        self.control = control
        self.lost: dict[int, TfdistError] = {}
        self._used: set[tuple[int, ...]] = set()
        self._unnoticed: TfdistError | None = None
        self._withdrawal: MismatchError | None = None
        self.beside = Beside(self)
        self.numbers = CallNumbers(control, self.beside)
        self.statistics = Statistics(communicator, self.beside)
        self._calls = CallsUnderWay(communicator, self.numbers, self.statistics, tags, self._started)
        self._timeouts = timeouts
        self._posting = threading.Lock()
        self._failure: TfdistError | None = None
        self._waiters = 0
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._is_called_by_threads = False
        self._attendance = JoinCoordinator(self)
        if control is not None:
            control.attend(self._attendance)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.communicator.size

    @property
    def timeline(self) -> EventRecorder | None:
        """Record of all collectives and waits; None if none is wanted."""
        return self._calls.timeline

    @timeline.setter
    def timeline(self, recorder: EventRecorder | None) -> None:
        self._calls.timeline = recorder
        self.beside.is_recorded.value = recorder is not None

    @property
    def failure(self) -> TfdistError | None:
        """The error because of which no collective can complete any more; None if there is none."""
        return self._failure

    @property
    def unnoticed(self) -> TfdistError | None:
        """The loss of a rank that shares a group with this process, if no call of this process has raised it."""
        return self._unnoticed

    def failure_of(self, members: Iterable[int]) -> TfdistError | None:
        """Returns the error because of which no collective of a group can complete any more, or None.

        Args:
            members: the group's ranks.
        """
        if self._failure or not self.lost:
            return self._failure
        missing = self.lost.keys() & members
        return self.lost[min(missing)] if missing else None

    def cause_of(self, message: str) -> TfdistError | None:
        """Returns the error of a collective that a message of TensorFlow quotes, or the one that ended all; else None.

        Args:
            message: message of an error of a graph that has called collectives.
        """
        quoted = self._withdrawal is not None and str(self._withdrawal) in message
        return self._failure or (self._withdrawal if quoted else None)

    def run(self, key: str, plan: Plan | Operation, signature: str = "", **how: Any) -> Any:
        """Runs a collective to its end, from ordinary (eager) code; see `post` and `wait`.

        Raises:
            TfdistError: a rank is lost, took part with other data, or did not come in time.
        """
        return self.wait(self.post(key, plan, signature, overlaps=False, **how))

    def post(
        self,
        key: str,
        plan: Plan | Operation,
        signature: str = "",
        *,
        overlaps: bool = True,
        members: tuple[int, ...] | None = None,
        contents: str = "",
        ready: float | None = None,
        patient: bool = False,
    ) -> Pending:
        """Begins a collective and returns at once, whether or not the other ranks have heard of it.

        Args:
            key: name of the call site, the same on every member.
            plan: the collective; its buffers must stay untouched until it is done. In an `Operation`, ranks without
                data can take part.
            signature: text that must be equal on all ranks (shapes, dtypes); compared when the key is new.
            overlaps: whether the collective progresses although no thread waits yet; false if a wait, of this
                collective or of another, follows at once.
            members: ranks that take part, in the order of the group; all by default. Other groups may use the same
                keys.
            contents: description of the data, for messages.
            ready: time at which the data were ready, on `time.monotonic`; now by default.
            patient: whether slow progress costs nothing while no thread waits.

        Raises:
            TfdistError: a member is lost, or an earlier collective has failed.
        """
        pending = Pending(key, members, contents, ready, patient)
        site = members, key
        everyone = self._members(members)
        self._is_called_by_threads |= is_beside_main_thread()
        with self._posting:  # so that calls of one key are queued in the order of their numbers
            if failure := self.failure_of(everyone):
                self._unnoticed = None
                raise failure
            if len(everyone) > 1:
                self._used.add(everyone)
            pending.operation, pending.call = operations.as_operation(plan), self.numbers.posted(site)
            self._attendance.check(pending, everyone)
            pending.number = self.numbers.agree(
                site, signature, functools.partial(self.agreed, site), functools.partial(self._undone, site)
            )
            self.numbers.begin(site)
            self._calls.queue(pending)
            if pending.number is None:
                pending.number = self.numbers.of(site)  # the answer may have come before the call was queued
        if pending.number is not None:
            try:
                self._calls.start()
            except Exception as error:
                self._explain(error)
        if overlaps:
            with self._work:
                self._wake()
        return pending

    def _wake(self) -> None:
        """Has the progress thread look after what is under way; `_work` is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._drive, name="tfdist-progress", daemon=True)
            self._thread.start()
        self._work.notify()

    def wait(self, pending: Pending) -> Any:
        """Waits for a collective to complete and returns its result.

        Args:
            pending: the posted collective.

        Raises:
            TfdistError: a rank is lost, took part with other data, or did not come in time.
        """
        with self._work:
            if not self._waiters:
                self.statistics.waiting.start()
            self._waiters += 1
        try:
            with self.timeline.waiting(pending) if self.timeline else contextlib.nullcontext():
                self._poll(pending)
        finally:
            with self._work:
                self._waiters -= 1
                if not self._waiters:
                    self.statistics.waiting.stop()
                if self.under_way():
                    self._wake()
        return pending.result

    def join(self) -> int:
        """Takes part without data in the other ranks' collectives until all have joined; returns the last rank.

        Raises:
            TfdistError: a rank is lost, or the job has failed.
        """
        return self._attendance.join()

    def fail(self, error: TfdistError, members: tuple[int, ...] | None = None) -> None:
        """Makes every wait, now and later, raise the error, and tells the other ranks unless they know it.

        Args:
            error: the reason.
            members: ranks of the group that a mismatch concerns; all by default.
        """
        if self._failure is None:
            self._failure = error
            if self.control and self.control.failure is None:
                self.control.tell_failure(error, members)

    def survives(self, rank: int, error: TfdistError) -> bool:
        """Returns whether this process goes on without a lost rank; called on the control connection's thread.

        It goes on if it has used a group of several ranks without the lost rank, and if MPI's other transfers go on
        after a death. The calls of groups with the lost rank fail.

        Args:
            rank: the lost rank.
            error: the reason of the loss.
        """
        with self._posting:
            others = [members for members in self._used if rank not in members]
            if self._closed or not others or not self.communicator.outlives_others:
                return False
            self.lost[rank] = error
            if len(others) < len(self._used):
                self._unnoticed = error
            self._calls.abandon(rank, error)
            return True

    def close(self) -> None:
        """Ends the progress thread."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        if self._thread:
            self._thread.join(5.0)

    # Reports to other ranks.

    def under_way(self) -> list[Pending]:
        """Returns the calls that this rank has posted and not completed."""
        return self._calls.calls()

    def state(self) -> RankStatus:
        """Returns the collectives that this rank has under way, for the explanation of a stall."""
        under_way = [*self.under_way(), *self.beside.waits]
        return RankStatus(tuple(pending.describe() for pending in under_way), self.numbers.counts())

    # Beginning.

    def _members(self, members: tuple[int, ...] | None) -> tuple[int, ...]:
        return tuple(range(self.size)) if members is None else members

    def agreed(self, site: Site, number: int) -> None:
        """Takes the number that the members have agreed on for a site, and numbers its queued calls."""
        with self._work:
            self.numbers.take(site, number)
            self._calls.take_number(site, number)
            self._work.notify()

    def _undone(self, site: Site, why: str) -> None:
        """Withdraws a call, because the members call different collectives and nothing has been sent yet."""
        error = self._withdrawal = MismatchError(why)
        with self._posting:
            is_withdrawn = self._calls.withdraw(site, error)
        if not is_withdrawn:
            self.fail(error, site[0])

    def _started(self, pending: Pending) -> None:
        if self.control and self.control.joined:
            self._attendance.invite(pending.describe(), pending.operation.stand_in)

    # For a rank that has joined.

    def drain(self) -> None:
        """Waits for all collectives under way."""
        for pending in self.under_way():
            self.wait(pending)

    def check(self, members: Iterable[int] = ()) -> None:
        """Raises the error that makes further waiting useless. Code that polls and never waits needs this check.

        Args:
            members: ranks of the group that is polled for; empty if only failures of the whole job matter.

        Raises:
            TfdistError: the job has failed, or a member is lost.
        """
        if self._failure is None and self.control and self.control.failure:
            self.fail(self.control.failure)
        if failure := self.failure_of(members):
            self._unnoticed = None
            raise failure

    # Making progress.

    def advance(self) -> bool:
        """Polls the transfers of all collectives once. Returns whether any of them progressed.

        Raises:
            TfdistError: no collective can complete any more.
        """
        try:
            if self._failure:
                raise self._failure
            return self._calls.advance()
        except Exception as error:
            self._explain(error)
            return False  # the call whose transfer broke was given up

    def _explain(self, error: Exception) -> None:
        """Raises the cause of a broken transfer's error, which the rendezvous server usually learns soon.

        If the cause is a lost rank, and this process goes on without it, only the calls with that rank have failed:
        once they are given up, this returns. No lock may be held: the control connection's thread takes them before it
        tells of a loss (`survives`).

        Args:
            error: the error, which is being handled.
        """
        if isinstance(error, TfdistError):
            self.fail(error)
            raise error
        known = self.control is not None and self.control.failure is not None
        if not known and not type(error).__module__.startswith("mpi4py"):
            self.fail(TfdistError(f"rank {self.rank} failed in a collective: {type(error).__name__}: {error}"))
            raise error
        end = time.monotonic() + _EXPLANATION_SECONDS
        while self.control and not self.control.failure and time.monotonic() < end:
            if self._calls.has_abandoned_broken():
                return
            time.sleep(0.01)
        explanation = (self.control.failure if self.control else None) or PeerLostError(
            f"rank {self.rank}: a transfer failed, and no rank reported why ({type(error).__name__}: {error}). "
            "If a link broke, start the job again."
        )
        self.fail(explanation)
        raise explanation from error

    def _poll(self, pending: Pending) -> None:
        begin, idling = time.monotonic(), Idling()
        patience: WaitMonitor | None = None
        try:
            while not pending.done:
                if pending.error:
                    self._unnoticed = None
                    raise pending.error
                if self.advance():
                    idling.moved()
                elif not idling.spin():
                    if self._failure:
                        raise self._failure
                    patience = patience or self.monitor(pending)
                    if patience:
                        patience.check(time.monotonic() - begin)
                    idling.nap()
        except TfdistError as error:
            if pending.error is None:
                self.fail(error, pending.members)
            raise
        finally:
            if patience:
                patience.over()

    def monitor(self, pending: Pending, has_order: bool = True) -> WaitMonitor | None:
        """Returns what decides how long to wait for a call; None for a process alone.

        Args:
            pending: the call, which may run beside the engine.
            has_order: whether this process begins no other call before this one is over.
        """

        def standing() -> WaitingForCall | None:
            if self._is_called_by_threads or not has_order:
                return None
            return WaitingForCall(pending.describe(), self.numbers.counts(), is_alone=self.under_way() == [pending])

        if self.control is None:
            return None
        members = self._members(pending.members)
        return WaitMonitor(self.rank, self.control, self._timeouts, pending, members, standing)

    def _drive(self) -> None:
        """Runs the progress thread, which drives posted collectives while no thread waits."""
        idling = Idling()
        while True:
            with self._work:
                while not self._closed and (self._waiters or self._failure or not self._calls.can_move()):
                    self._work.wait()
                    idling = Idling()
                if self._closed:
                    return
            try:
                moved = self.advance()
            except Exception:
                continue  # the error is kept as the engine's failure, which the next wait raises
            if moved:
                idling.moved()
            elif all(pending.patient for pending in self.under_way()):
                with self._work:
                    self._work.wait(_PATIENT_NAP)  # ends early when something is posted
            else:
                idling.nap()


def describe(arrays: Sequence[np.ndarray]) -> str:
    """Describes shapes and dtypes, for signatures and messages."""
    return ", ".join(_described(array.dtype, array.shape) for array in arrays)


@functools.lru_cache(1024)
def _described(dtype: np.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape}"
