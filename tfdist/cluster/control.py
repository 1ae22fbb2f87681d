"""A task's membership in its job: which tasks are there, values exchanged with them, and news of their ends."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfdist.cluster import messages
from tfdist.cluster.channel import Channel, seldom
from tfdist.cluster.connection import connect
from tfdist.cluster.message import RendezvousMessage
from tfdist.cluster.messages import Claims
from tfdist.cluster.quorum_messages import MeetingAborted
from tfdist.cluster.settings import Timeouts
from tfdist.errors import MismatchError, PeerLostError, RendezvousError, TfdistError

log = logging.getLogger("tfdist")

_PROGRESS_SECONDS = 10.0
_BEYOND_SECONDS = 30.0
"""Seconds beyond the start's deadline in which the server may still explain which tasks are missing."""


class Listener(Protocol):
    """Receives the server's messages about collectives, on the listening thread; see `tfdist.engine.joining`."""

    def state(self) -> messages.RankStatus:
        """Returns which collectives this rank has under way."""
        ...

    def rank_joined(self) -> None:
        """Learns that another rank has no more data; that rank is already in `Control.joined`."""
        ...

    def all_joined(self, last: int, counts: Mapping[int, int]) -> None:
        """Learns that no rank has more data; see `tfdist.cluster.messages.AllJoined`."""
        ...

    def invited(self, invitation: messages.Invited) -> None:
        """Has this rank, which has joined, take part in a collective without data."""
        ...

    def survives(self, rank: int, error: TfdistError) -> bool:
        """Returns whether this process can go on without a lost rank, because they share no group."""
        ...


class Watcher:
    """Receives events about tasks, on the listening thread, and decides what they mean; by default nothing."""

    def came(self, task: int) -> None:
        """Learns that a task is there, for the first time or again."""

    def lost(self, task: int, error: TfdistError) -> None:
        """Learns that a task died, cannot be reached or has failed."""

    def left(self, task: int) -> None:
        """Learns that a task has ended without an error."""

    def over(self) -> None:
        """Learns that no training task is left."""

    def failed(self, error: TfdistError) -> None:
        """Learns that this process cannot go on, perhaps on the thread that has found that out."""


class Control:
    """A task's membership in its job, over its connection to the rendezvous server.

    Args:
        address: ``host:port`` of the rendezvous server.
        claims: this task's statement about itself.
        secret: the job's secret, or empty bytes.
        timeouts: the deadlines for waits for the server and the other tasks.

    Attributes:
        claims: this task's statement about itself.
        task: this task's number, once admitted.
        job: the job's unique name, once admitted.
        present: names of the tasks that are there, by number; includes this task.
        peer_died: whether `failure` has come because a process died or cannot be reached, and not because it
            reported an error.
        fails_first: whether an error of this task itself makes the job fail.
        departed: number of calls of each collective that a task had posted when its script ended, by task.
        names: names for messages of the tasks whose scripts have ended, by task.
        joined: number of calls of each collective that a rank had posted when it joined (`Engine.join`), by rank.
        stall: the server's last explanation of a stall; None if there was none.
    """

    def __init__(self, address: str, claims: Claims, secret: bytes, timeouts: Timeouts) -> None:
        self.address = address
        self.task = -1
        self.job = ""
        self.present: dict[int, str] = {}
        self.peer_died = False
        self.fails_first = False
        self.departed: dict[int, dict[int, int]] = {}
        self.names: dict[int, str] = {}
        self.joined: dict[int, dict[int, int]] = {}
        self.stall: messages.StallReport | None = None
        self.claims = claims
        self._secret = secret
        self._timeouts = timeouts
        self._channel = Channel(address, self._heard, self._broken, timeouts.heartbeat)
        self._is_bound = False
        self._missing: tuple[str, ...] = ()
        self._refusals_logged = 0
        self._listener: Listener | None = None
        self._watchers: list[Watcher] = []
        self._on_failure: Callable[[TfdistError], None] | None = None
        self._on_abort: list[weakref.WeakMethod[Callable[[MeetingAborted], None]]] = []
        self._all_ended = False
        self._has_left = False
        self._is_over = False

    @property
    def failure(self) -> TfdistError | None:
        """The error because of which this process cannot go on; None as long as there is none."""
        return self._channel.failure

    # Entering and leaving the job.

    def enter(self) -> None:
        """Connects to the rendezvous server and gets this task admitted.

        Raises:
            RendezvousError: the server cannot be reached, is not this job's server, or refuses this task.
        """
        connection, welcome = connect(self.address, self.claims, self._secret, self._timeouts.start)
        self.task, self.job = welcome.task, welcome.job
        self._channel.open(connection)

    def after_fork(self) -> None:
        """Leaves the connection to the parent, in a child process."""
        self._channel.after_fork()

    def leave(self, failed: str | None, counts: dict[int, int], timeout: float = 0.0) -> None:
        """Reports that this task's script has ended.

        Args:
            failed: the error that the script ended with; None without an error.
            counts: number of calls of each collective that this task has posted.
            timeout: seconds to wait until the server has the message. If the connection is closed earlier the message
                may be lost.
        """
        self.send(messages.ScriptEnded(failed, counts))
        with self._channel.arrived:
            self._channel.arrived.wait_for(lambda: self._has_left or self.failure is not None, timeout)

    def end(self, timeout: float) -> None:
        """Reports that this task has shut MPI down, and waits until all tasks have; the death of one is a failure."""
        self.send(messages.MPIShutDown())
        with self._channel.arrived:
            self._channel.arrived.wait_for(lambda: self._all_ended or self.failure is not None, timeout)

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    # Messages and values.

    def send(self, message: RendezvousMessage) -> None:
        """Sends a message without a reply; see `Channel.send`."""
        self._channel.send(message)

    def request(
        self,
        make: Callable[[int], RendezvousMessage],
        timeout: float | None = None,
        late: Callable[[float], None] | None = None,
    ) -> Any:
        """Sends a message and waits for its reply, by default until the start's deadline; see `Channel.request`."""
        return self._channel.request(make, self._timeouts.start if timeout is None else timeout, late)

    def ask(
        self,
        make: Callable[[int], RendezvousMessage],
        then: Callable[[Any], None],
        refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Sends a message and returns at once; see `Channel.ask`."""
        self._channel.ask(make, then, refused)

    def gather(self, name: str, value: Any, tasks: Sequence[int]) -> list[Any]:
        """Waits for a value from each of several tasks, and returns the values in the order of ``tasks``.

        Args:
            name: name of this exchange, used only once for the same tasks.
            value: this task's value, which JSON can hold.
            tasks: numbers of the tasks that take part, including this one.

        Raises:
            RendezvousError: one of the tasks reported a failure, or there was no answer in time.
        """
        return self.request(lambda number: messages.GatherValues(number, name, tuple(tasks), value))

    def bind(self, value: Any, ranks: int) -> list[Any]:
        """Waits until all training tasks are about to start MPI; from then on they depend on each other.

        Args:
            value: this task's value, which JSON can hold.
            ranks: number of training tasks.

        Returns:
            The values of all training tasks, by rank.

        Raises:
            RendezvousError: not all training tasks came before the deadline, or one of them has failed.
        """

        def say() -> None:
            if self._missing:
                log.warning("tfdist: waiting for %s", ", ".join(self._missing))

        self._is_bound = True
        everyone = tuple(range(ranks))
        return self.request(
            lambda number: messages.GatherValues(number, "bind", everyone, value, binds=True),
            self._timeouts.start + _BEYOND_SECONDS,
            seldom(_PROGRESS_SECONDS, say),
        )

    def barrier(self, name: str, tasks: Sequence[int]) -> None:
        """Waits for several tasks; see `gather`."""
        self.gather(name, None, tasks)

    def publish(self, key: str, value: str) -> None:
        """Makes a value, such as this task's address, known to all tasks for as long as this task is there."""
        self.send(messages.PublishValue(key, value))

    def look_up(self, key: str, timeout: float | None = None) -> str:
        """Returns a published value, and waits until there is one.

        Args:
            key: name that the value is published under; see `publish`.
            timeout: seconds to wait; None waits until the start's deadline.

        Raises:
            RequestTimeoutError: no task published the value in time.
        """
        late = seldom(_PROGRESS_SECONDS, lambda: log.warning("tfdist: waiting for the %s", key))
        return self.request(lambda number: messages.GetValue(number, key, wait=True), timeout, late)

    def known(self, key: str) -> str | None:
        """Returns a value that is published now, or None.

        Args:
            key: name that the value is published under; see `publish`.
        """
        value: str | None = self.request(lambda number: messages.GetValue(number, key, wait=False))
        return value

    def ask_for(self, key: str, then: Callable[[str], None]) -> None:
        """Calls back on the listening thread with a value, as soon as a task has published it.

        Args:
            key: name that the value is published under; see `publish`.
            then: callback, called with the value.
        """
        self.ask(lambda number: messages.GetValue(number, key, wait=True), then)

    # Events.

    def watch(self, watcher: Watcher) -> None:
        """Sends events about tasks to a watcher from now on, and at once that the job is over, if it is."""
        self._watchers.append(watcher)
        if self._is_over:
            watcher.over()

    def attend(self, listener: Listener | None) -> None:
        """Registers the listener for the server's messages about collectives."""
        self._listener = listener

    def when_aborted(self, callback: Callable[[MeetingAborted], None]) -> None:
        """Calls back on the listening thread, from now on, when a meeting of this task is aborted.

        Args:
            callback: bound method; only a weak reference to its object is kept.
        """
        self._on_abort.append(weakref.WeakMethod(callback))

    def when_failed(self, callback: Callable[[TfdistError], None] | None) -> None:
        """Calls back when this process cannot go on: on the listening thread, or at once if that is known already.

        Args:
            callback: function to call with the error; None removes the callback.
        """
        self._on_failure = callback
        if callback and self.failure:
            callback(self.failure)

    def tell_failure(self, error: BaseException, members: tuple[int, ...] | None = None) -> None:
        """Tells the other tasks why this one cannot go on.

        Args:
            error: the reason.
            members: ranks that a mismatch concerns; all by default.
        """
        why = str(error) if isinstance(error, TfdistError) else f"{type(error).__name__}: {error}"
        self.send(messages.ReportFailure(why[:1000], isinstance(error, MismatchError), members))

    def fail(self, error: TfdistError) -> None:
        """Records that this process cannot go on. The first error counts."""
        self._channel.failure = self._channel.failure or error
        self._channel.notify()
        if callback := self._on_failure:
            callback(error)
        for watcher in self._watchers:
            watcher.failed(error)

    # Messages, on the listening thread.

    def _broken(self, error: TfdistError, peer_died: bool) -> None:
        if not self._is_over:
            self.peer_died = peer_died and self.failure is None
            self.fail(error)

    def _heard(self, message: messages.FromServer) -> None:
        match message:
            case messages.TaskPresent(task, name):
                self.present[task] = name
                for watcher in self._watchers:
                    watcher.came(task)
            case messages.TaskLost():
                self._heard_of_loss(message)
            case messages.TaskFinished(task, name, counts):
                self.present.pop(task, None)
                self.names[task] = name
                self.departed[task] = counts
                self._note_own_end(task)
                for watcher in self._watchers:
                    watcher.left(task)
            case messages.MissingTasks():
                self._log_refusals(message)
            case messages.JobFailed(why, mismatch):
                self.fail(MismatchError(why) if mismatch else RendezvousError(why))
            case messages.AllMPIShutDown():
                self._all_ended = True
                self._channel.notify()
            case messages.JobOver():
                self._is_over = True
                for watcher in self._watchers:
                    watcher.over()
            case MeetingAborted():
                for method in self._on_abort:
                    if (callback := method()) is not None:
                        callback(message)
            case messages.StallReport():
                self.stall = message
                log.warning("tfdist: %s", message.why)
            case _:
                self._heard_of_collectives(message)

    def _log_refusals(self, message: messages.MissingTasks) -> None:
        self._missing = message.tasks
        waiting = f"; still waiting for {', '.join(message.tasks)}" if message.tasks else ""
        for who in message.refused[self._refusals_logged :]:
            log.warning("tfdist: refused %s%s", who, waiting)
        self._refusals_logged = len(message.refused)

    def _note_own_end(self, task: int) -> None:
        if task == self.task:
            self._has_left = True
            self._channel.notify()

    def _heard_of_loss(self, lost: messages.TaskLost) -> None:
        self.present.pop(lost.task, None)
        self._note_own_end(lost.task)
        error = PeerLostError(lost.why)
        if lost.task == self.task and lost.died:
            again = "" if lost.bound else ", and start the task again"
            self.fail(
                PeerLostError(
                    f"{lost.why} The other tasks consider this process, task {self.task}, lost: end it{again}."
                )
            )
            return
        for watcher in self._watchers:
            watcher.lost(lost.task, error)
        if not (lost.bound and self._is_bound):
            if lost.task != self.task:
                log.warning("tfdist: %s", lost.why)
            return
        if self._listener is not None and self._listener.survives(lost.task, error):
            log.warning("tfdist: %s This process goes on with the groups that do not contain that rank.", lost.why)
            return
        if self.failure is None:
            self.peer_died = lost.died
        self.fail(error)

    def _heard_of_collectives(self, message: messages.FromServer) -> None:
        if isinstance(message, messages.RankJoined):
            self.joined[message.rank] = message.counts
        elif isinstance(message, messages.AllJoined):
            self.joined = {}
        if self._listener is None:
            return
        match message:
            case messages.StatusRequest():
                self.send(self._listener.state())
            case messages.RankJoined():
                self._listener.rank_joined()
            case messages.AllJoined(last, counts):
                self._listener.all_joined(last, counts)
            case messages.Invited():
                self._listener.invited(message)
