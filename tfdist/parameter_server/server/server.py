"""A server's socket: takes messages off it, one after the other, and sends the answers of the shards."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zmq

from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.line import Line
from tfdist.parameter_server.protocol.messages import (
    FROM_SERVER,
    FROM_WORKER,
    CreateShard,
    Done,
    Inspect,
    LeaveModel,
    OfferSegment,
    Push,
    ReadModel,
    Refused,
)
from tfdist.parameter_server.protocol.shared_memory import Segment, locator_of
from tfdist.parameter_server.protocol.tables import AttachTable
from tfdist.parameter_server.protocol.wire import InvalidMessageError, Message
from tfdist.parameter_server.server import copies
from tfdist.parameter_server.server.log import ReplicationLog
from tfdist.parameter_server.server.replication_messages import StateComplete, TaskArrived, WorkerLost, WorkerMessage
from tfdist.parameter_server.server.shards import Shards
from tfdist.parameter_server.shard.shard import Answer

log = logging.getLogger("tfdist")

_LOGGED = 100
"""The most peers whose invalid messages are logged, once each."""
_WHY_CHARACTERS = 500
"""The most characters of an error that are logged and answered, as it may quote the message."""


@dataclass
class _SharedSegment:
    """A memory segment that is shared with the worker of a connection.

    Attributes:
        memory: the segment.
        worker: task number of the worker.
        last: the highest ``id`` of a push whose answer may be in the segment.
    """

    memory: Segment
    worker: int
    last: int = -1


class ParameterServer:
    """A server of shards over TCP, one shard for each model that is trained.

    Args:
        shards: the shards, which nobody else uses while the server runs.
        address: ``host:port`` to listen at; port 0 takes a free one.
        keys: encryption keys of the job; None expects unencrypted messages.
        follower: log that replicates messages to a follower; None if there is never a follower.

    Attributes:
        address: ``host:port`` that the server listens at.
    """

    def __init__(
        self, shards: Shards, address: str, keys: Keys | None = None, follower: ReplicationLog | None = None
    ) -> None:
        self._shards = shards
        self._log = follower or ReplicationLog()
        self._segments: dict[bytes, _SharedSegment] = {}
        self._context = zmq.Context(1)
        self._line, self.address = Line.listening(self._context, address, keys, (zmq.LINGER, 1000))
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._complained: set[str] = set()

    def run(self) -> None:
        """Serves until `stop`."""
        poller, followed = self._poller(), self._log.socket
        try:
            while True:
                if followed is not self._log.socket:
                    poller, followed = self._poller(), self._log.socket
                ready = dict(poller.poll(self._milliseconds()))
                if self._wake.fileno() in ready:
                    self._wake.recv(1)
                    event = self._events.get()
                    if event is None:
                        return
                    event()
                if self._line.socket in ready:
                    self._receive()
                self._log.attend()
                for shard_or_table in (*self._shards, *self._shards.tables):
                    if shard_or_table.snapshots is not None and not shard_or_table.snapshots.seconds_left:
                        shard_or_table.take_snapshot()
        finally:
            self._shards.close()
            self._log.close()
            self._line.close()
            self._context.term()
            self._wake.close()
            self._waker.close()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for polled_socket in (self._line.socket, self._wake, self._log.socket):
            if polled_socket is not None:
                poller.register(polled_socket, zmq.POLLIN)
        return poller

    def _milliseconds(self) -> int | None:
        """Returns the milliseconds until a snapshot is due or entries are sent again; None if nothing is due."""
        kept = [shard_or_table.snapshots for shard_or_table in (*self._shards, *self._shards.tables)]
        left = [snapshots.seconds_left for snapshots in kept if snapshots is not None]
        left += [] if self._log.seconds_left is None else [self._log.seconds_left]
        return 1 + int(1000 * min(left)) if left else None

    def lost(self, worker: int) -> None:
        """Tells the shards that a worker is lost or has ended; may be called from any thread.

        Args:
            worker: task number of the worker.
        """

        def event() -> None:
            self._shards.lost(worker)
            self._log.append(WorkerLost, worker)
            self._segments = {peer: shared for peer, shared in self._segments.items() if shared.worker != worker}

        self.tell(event)

    def came(self, task: int) -> None:
        """Tells the shards that a task has come; may be called from any thread.

        Args:
            task: number of the task.
        """

        def event() -> None:
            self._shards.came(task)
            self._log.append(TaskArrived, task)

        self.tell(event)

    def followed(self, address: str | None) -> None:
        """Begins to replicate everything to a follower; may be called from any thread.

        Args:
            address: ``host:port`` of the follower; None if the follower is lost.
        """
        self.tell(lambda: self._log.end() if address is None else self._begin_log(address))

    def stop(self) -> None:
        """Ends `run`; may be called from any thread."""
        self.tell(None)

    def copy(self) -> None:
        """Sends the whole state to the follower. Call it before `run`, or in the thread of `run`."""
        copies.append_all(self._log.append, self._shards)
        self._log.append(StateComplete)

    def _begin_log(self, address: str) -> None:
        self._log.begin(address)
        self.copy()

    def tell(self, event: Callable[[], None] | None) -> None:
        """Has the thread of `run` call a function; may be called from any thread.

        Args:
            event: the function; None ends `run`.
        """
        self._events.put(event)
        with contextlib.suppress(OSError):  # `run` has ended already
            self._waker.send(b"\0")

    def _receive(self) -> None:
        peer, frames = self._line.receive_from()
        try:
            locator = locator_of(frames)
            shared = self._segments.get(peer)
            if locator is not None and shared is None:
                why = "this server was started again and has mapped no segment"
                self._line.answer(peer, FROM_SERVER.encode(Refused(locator.id, why, is_unknown=True)))
                return
            if locator is not None and shared is not None:
                frames = shared.memory.restored(locator, frames[1], is_answer=False)
            message, arrays = FROM_WORKER.decode(frames)
        except InvalidMessageError as error:
            self._complain(error)
            return
        slot = None
        if shared is not None and isinstance(message, Push) and message.id > shared.last:
            shared.last = message.id  # a second answer would overwrite memory that the worker reads
            slot = message.sequence % shared.memory.slots

        def send(message: Message, arrays: Sequence[np.ndarray]) -> None:
            encoded = FROM_SERVER.encode(message, arrays)
            if shared is not None and slot is not None:
                encoded = shared.memory.moved(slot, encoded, is_answer=True)
            self._line.answer(peer, encoded)

        try:
            if isinstance(message, OfferSegment):
                self._share(peer, message, send)
            elif isinstance(message, (Inspect, ReadModel)):
                self._shards.heard(peer, message, arrays, send)
            else:
                self._shards.heard(peer, message, arrays, lambda *answered: self._log.hold(partial(send, *answered)))
                self._note(peer, message, frames)
        except Exception as error:  # a valid message that does not fit the state must not end the job of others
            why = f"{type(message).__name__} does not fit the state of this server: {type(error).__name__}: {error}"
            self._complain(InvalidMessageError(why[:_WHY_CHARACTERS]))
            send(Refused(message.id, why[:_WHY_CHARACTERS]), ())
        if isinstance(message, LeaveModel):
            self._segments.pop(peer, None)

    def _note(self, peer: bytes, message: Any, frames: Sequence[Any]) -> None:
        """Sends a handled message to the follower, and copies of what was read from snapshots, which it cannot read."""
        self._log.append(WorkerMessage, peer, arrays=[np.frombuffer(frame, np.uint8) for frame in frames])
        if isinstance(message, CreateShard):
            for key in self._shards.models():
                if self._shards[key].is_restored:
                    copies.append_shard(self._log.append, key, self._shards[key])
                    self._shards[key].is_restored = False
        if isinstance(message, AttachTable):
            for name in self._shards.tables.names():
                served = self._shards.tables.served(name)
                if served.is_restored:
                    copies.append_table(self._log.append, served)
                    served.is_restored = False

    def _share(self, peer: bytes, message: OfferSegment, answer: Answer) -> None:
        segment = Segment.open(message.where, message.area, message.slots)
        if segment is None:
            answer(Refused(message.id, "the segment cannot be mapped"), ())
            return
        self._segments[peer] = _SharedSegment(segment, message.worker)
        answer(Done(message.id, 0), ())

    def _complain(self, error: InvalidMessageError) -> None:
        peer = self._line.last_address
        if peer not in self._complained and len(self._complained) < _LOGGED:
            self._complained.add(peer)
            log.warning("tfdist: the parameter server ignores invalid messages from %s: %s", peer, error)
