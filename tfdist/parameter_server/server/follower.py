"""A follower: it repeats what its leader does, until it has to lead itself."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
from collections.abc import Callable
from typing import Literal

import numpy as np
import zmq

from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.line import Line
from tfdist.parameter_server.protocol.messages import FROM_WORKER
from tfdist.parameter_server.protocol.wire import InvalidMessageError
from tfdist.parameter_server.server import copies
from tfdist.parameter_server.server.replication_messages import (
    FROM_FOLLOWER,
    FROM_LEADER,
    Acknowledged,
    BeginStream,
    DealsCopy,
    Entry,
    ProgramsCopy,
    ShardCopy,
    StateComplete,
    StatesCopy,
    TableCopy,
    TaskArrived,
    WorkerLost,
    WorkerMessage,
)
from tfdist.parameter_server.server.shards import Shards

log = logging.getLogger("tfdist")


class ServerReplica:
    """A follower's copy of its leader's state. It uses no sockets.

    Args:
        make: function that makes an empty state.
        server: index of the parameter server.

    Attributes:
        shards: the leader's state up to the last entry.
        is_whole: whether the copy is complete, so that the follower can take over.
    """

    def __init__(self, make: Callable[[], Shards], server: int) -> None:
        self._make = make
        self._server = server
        self._stream: int | None = None
        self._number = -1
        self.shards = make()
        self.is_whole = False

    def take(self, entry: Entry, arrays: list[np.ndarray]) -> Acknowledged | None:
        """Applies an entry, if it is the next one.

        Args:
            entry: entry of a leader.
            arrays: arrays of the entry; read-only views that do not change.

        Returns:
            The acknowledgement to send; None for an entry of a stream that this follower does not follow.
        """
        if isinstance(entry, BeginStream) and entry.stream != self._stream and not self.is_whole:
            self._stream, self._number, self.shards = entry.stream, -1, self._make()
        if entry.stream != self._stream:
            return None
        if entry.number == self._number + 1:
            self._number = entry.number
            self._do(entry, arrays)
        return Acknowledged(entry.stream, self._number)

    def forget(self) -> None:
        """Stops following a leader that was lost before the copy was complete."""
        if not self.is_whole:
            self._stream = None

    def _do(self, entry: Entry, arrays: list[np.ndarray]) -> None:
        match entry:
            case WorkerMessage():
                message, payload = FROM_WORKER.decode(arrays)
                self.shards.heard(_named(entry.peer), message, payload, lambda answer, arrays: None)
            case WorkerLost():
                self.shards.lost(entry.worker)
            case TaskArrived():
                self.shards.came(entry.worker)
            case ProgramsCopy():
                copies.put_programs(self.shards, entry, _named)
            case StatesCopy():
                copies.put_states(self.shards, entry, arrays)
            case ShardCopy():
                copies.put_shard(self.shards, entry, arrays)
            case TableCopy():
                copies.put_table(self.shards, entry, arrays)
            case DealsCopy():
                copies.put_deals(self.shards, entry)
            case StateComplete():
                self.is_whole = True
                if self.shards.models() or self.shards.tables.names():  # not at the start of a job
                    log.warning("tfdist: this task has a copy of parameter server %d again.", self._server)


class Follower:
    """A follower that receives its leader's entries over TCP.

    Args:
        make: function that makes an empty state.
        server: index of the parameter server.
        host: host to listen at, on a free port.
        keys: encryption keys of the job; None expects unencrypted messages.

    Attributes:
        address: ``host:port`` that the follower listens at.
    """

    def __init__(self, make: Callable[[], Shards], server: int, host: str, keys: Keys | None = None) -> None:
        self._replica = ServerReplica(make, server)
        self._context = zmq.Context(1)
        self._line, self.address = Line.listening(self._context, f"{host}:0", keys, (zmq.LINGER, 1000))
        self._events: queue.SimpleQueue[Literal["lost", "stop"]] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._has_complained = False

    def run(self) -> Shards | None:
        """Follows until the leader is lost, or until `stop`.

        Returns:
            The state to lead with; None after `stop`.
        """
        poller = zmq.Poller()
        poller.register(self._line.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._line.socket in ready:
                    self._receive()
                if self._wake.fileno() in ready and self._line.socket not in ready:  # first what the leader has sent
                    self._wake.recv(1)
                    if self._events.get() == "stop":
                        return None
                    if self._replica.is_whole:
                        return self._replica.shards
                    self._replica.forget()
        finally:
            self._line.close()
            self._context.term()
            self._wake.close()
            self._waker.close()

    def leader_lost(self) -> None:
        """Reports that the leader is lost; may be called from any thread."""
        self._tell("lost")

    def stop(self) -> None:
        """Ends `run`; may be called from any thread."""
        self._tell("stop")

    def _tell(self, event: Literal["lost", "stop"]) -> None:
        self._events.put(event)
        with contextlib.suppress(OSError):  # `run` has ended already
            self._waker.send(b"\0")

    def _receive(self) -> None:
        """Receives and applies an entry."""
        peer, frames = self._line.receive_from()
        try:
            answer = self._replica.take(*FROM_LEADER.decode(frames))
        except InvalidMessageError as error:
            if not self._has_complained:
                self._has_complained = True
                log.warning("tfdist: the copy of a parameter server ignores invalid messages: %s", error)
            return
        if answer is not None:
            self._line.answer(peer, FROM_FOLLOWER.encode(answer))


def _named(peer: bytes) -> bytes:
    """Returns a name for a connection of the leader that differs from this process's own connections."""
    return b"of the leader: " + peer
