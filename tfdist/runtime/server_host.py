"""Runs a parameter server on one of its tasks: as the leader, or as a follower that may take over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from tfdist.cluster.control import Control, Watcher
from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import Task
from tfdist.errors import RendezvousError, TfdistError
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.server.follower import Follower
from tfdist.parameter_server.server.log import ReplicationLog
from tfdist.parameter_server.server.server import ParameterServer
from tfdist.parameter_server.server.shards import Shards
from tfdist.runtime.server_address import address_of
from tfdist.runtime.server_state import ServerStateFactory

log = logging.getLogger("tfdist")

_LOOK_SECONDS = 0.2
"""Seconds between two checks whether the other task has come."""
_PATIENCE_SECONDS = 10.0
"""Seconds after which the user is told what a server waits for."""


def _copy_on(server: int, task: Task) -> str:
    """Returns the key under which a task publishes the address of its follower; the value is empty once it leads."""
    return f"address of the copy of parameter server {server} on {task}"


class Host(Watcher):
    """A parameter server on this task.

    With a copy, two tasks may run the server: the task of its own index and the next one. One of them leads, and the
    other follows with a copy of the state. The follower decides which task leads, because it follows only one leader.
    It takes over when it has the leader's whole state and the rendezvous server reports that the leader is lost.

    Args:
        control: this task's membership, which reports events of other tasks.
        tasks: the job's tasks, by number.
        has_copy: whether another task has a copy of the server's state.
        template: maker of the server's state.
    """

    def __init__(self, control: Control, tasks: Sequence[Task], has_copy: bool, template: ServerStateFactory) -> None:
        server = template.server
        numbers = [number for number, task in enumerate(tasks) if task.job == "ps"]
        this_server = numbers.index(control.task)
        of_server = {server, (server + 1) % len(numbers)}
        self._control = control
        self._tasks = tasks
        self._server = server
        self._is_first = this_server == server
        self._other = numbers[(of_server - {this_server}).pop()] if has_copy else None
        self._template = template
        self._lock = threading.Lock()
        self._absent: set[int] = set()
        self._is_over = False
        self._running: ParameterServer | Follower | None = None
        self._has_follower = False

    def run(self, keys: Keys | None, timeouts: Timeouts) -> None:
        """Serves until the job is over, or until `stop`.

        Args:
            keys: the job's encryption keys; None for no encryption.
            timeouts: the deadlines for waits for other tasks.

        Raises:
            TfdistError: the server cannot listen at its address, or the other task has not come.
        """
        follower = ReplicationLog(keys)
        self._control.watch(self)
        if self._is_first and (self._other is None or self._wait_for_follower(follower, timeouts.start)):
            self._lead(self._template.leading(), follower, keys)
            return
        shards = self._follow(keys)
        if shards is None:
            follower.close()
            return
        log.warning(
            "tfdist: %s is lost: %s, which has a copy of its part of the model, takes over.",
            self._tasks[self._other or 0],
            self._tasks[self._control.task],
        )
        self._template.take_over(shards)
        self._lead(shards, follower, keys)

    def stop(self) -> None:
        """Ends `run`. May be called on any thread."""
        with self._lock:
            self._is_over = True
            if self._running is not None:
                self._running.stop()

    # Events of the rendezvous, on its thread.

    def came(self, task: int) -> None:
        """Tells the server that a task is there; if it is the other task of this server, invites it to follow."""
        with self._lock:
            self._absent.discard(task)
            if isinstance(self._running, ParameterServer):
                self._running.came(task)
                if task == self._other:
                    self._invite()

    def lost(self, task: int, error: TfdistError) -> None:
        """Stops waiting for a lost worker or follower; takes over from a lost leader."""
        with self._lock:
            self._absent.add(task)
            self._has_follower = self._has_follower and task != self._other
            if isinstance(self._running, ParameterServer):
                self._running.lost(task)
                if task == self._other:
                    self._running.followed(None)
            elif isinstance(self._running, Follower) and task == self._other:
                self._running.leader_lost()

    def left(self, task: int) -> None:
        """Stops waiting for a worker that has ended."""
        with self._lock:
            self._absent.add(task)
            if isinstance(self._running, ParameterServer):
                self._running.lost(task)

    def over(self) -> None:
        """Ends `run`, because no training task is left."""
        self.stop()

    # The parts of `run`.

    def _wait_for_follower(self, follower: ReplicationLog, seconds: float) -> bool:
        """Waits until the other task follows or leads. Returns whether it follows, so that this task may lead."""
        assert self._other is not None
        copy = _copy_on(self._server, self._tasks[self._other])
        start, begun, told = time.monotonic(), "", False
        while (waited := time.monotonic() - start) < seconds and not self._is_over:
            if waited > _PATIENCE_SECONDS and not told:
                told = True
                log.warning("tfdist: waiting for %s, which must keep a copy of this server.", self._tasks[self._other])
            if self._control.known(address_of(self._server)):
                follower.end()
                return False
            address = self._control.known(copy)
            if address and address != begun:
                follower.begin(address)
                begun = address
            if follower.socket is not None:
                follower.socket.poll(int(1000 * _LOOK_SECONDS))
                follower.attend()
            else:
                time.sleep(_LOOK_SECONDS)
            if follower.is_begun:
                self._has_follower = True
                return True
        if self._is_over:
            return False
        raise RendezvousError(
            f"{self._tasks[self._other]} has not come within {seconds:g} s: with Servers(copies=1) it has to keep the "
            f"copy of {self._tasks[self._control.task]}. Start it, or set Servers(copies=0) on all tasks."
        )

    def _follow(self, keys: Keys | None) -> Shards | None:
        """Follows the leader until it is lost.

        Returns:
            The state to lead with; None if the job is over.
        """
        copy = _copy_on(self._server, self._tasks[self._control.task])
        follower = Follower(self._template.following, self._server, self._own_host(), keys)
        self._begin(follower)
        self._control.publish(copy, follower.address)
        shards = follower.run()
        with self._lock:
            self._running = None
        if not self._is_over:
            self._control.publish(copy, "")
        return shards

    def _lead(self, shards: Shards, follower: ReplicationLog, keys: Keys | None) -> None:
        address = self._tasks[self._control.task].address if self._is_first else f"{self._own_host()}:0"
        server = ParameterServer(shards, address, keys, follower)
        self._template.tell = server.tell
        if self._has_follower:
            server.copy()
        self._begin(server)
        with self._lock:
            for task in self._absent:
                server.lost(task)
            if follower.is_begun and not self._has_follower:
                server.followed(None)
            if self._other in self._control.present:
                self._invite()
        self._control.publish(address_of(self._server), server.address)
        server.run()

    def _begin(self, running: ParameterServer | Follower) -> None:
        """Makes a server or follower the receiver of events from now on."""
        with self._lock:
            self._running = running
            if self._is_over:
                running.stop()

    def _invite(self) -> None:
        """Lets the other task follow, as soon as it has published its follower's address."""
        if self._has_follower or self._other is None:
            return
        self._has_follower = True
        server = self._running
        assert isinstance(server, ParameterServer)

        def follow(address: str) -> None:
            if address:
                server.followed(address)

        self._control.ask_for(_copy_on(self._server, self._tasks[self._other]), follow)

    def _own_host(self) -> str:
        return self._tasks[self._control.task].address.rpartition(":")[0]
