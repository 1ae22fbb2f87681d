"""Connections between the processes of a job, over ZeroMQ: for fetching states, and for pieces of what is exchanged.

A process answers on one socket, which a thread serves, so that others can fetch its state while steps are computed. It
sends over a further socket for each process that it sends to.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import zmq

from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.line import Line
from tfdist.parameter_server.protocol.wire import InvalidMessageError, Message
from tfdist.quorum.messages import CODEC, ArrayPiece, FetchedState, FetchState

log = logging.getLogger("tfdist")

_LOOK_SECONDS = 0.2
"""Interval at which a wait checks whether it still makes sense."""
_CLOSE_SECONDS = 5.0
_LOGGED = 20
"""Maximum number of invalid messages that are logged."""
_UNKNOWN = 16
"""Maximum number of names of rounds unknown to this process for which pieces are kept."""


class StateSource(Protocol):
    """An object with a state that other processes fetch."""

    def state(self, request: int) -> tuple[FetchedState, list[np.ndarray]]:
        """Returns the answer to a request; called on the thread of `Links`.

        Args:
            request: id of the request, which the answer repeats.
        """
        ...


class Links:
    """The connections of this process to the others.

    Args:
        task: number of this process.
        host: host at which others reach this process.
        keys: encryption keys of the job; None for no encryption.

    Attributes:
        address: ``host:port`` at which this process answers.
        arrived: condition that is notified when a piece has arrived or a meeting is aborted.
        bytes_sent: bytes of arrays that were sent.
        messages_sent: number of pieces that were sent.
    """

    def __init__(self, task: int, host: str, keys: Keys | None) -> None:
        self.arrived = threading.Condition()
        self.bytes_sent = self.messages_sent = 0
        self._task = task
        self._lines = _Lines(host, keys)
        self.address = self._lines.address
        self._to: dict[str, Line] = {}
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._sources: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._pieces: dict[str, dict[int, list[tuple[ArrayPiece, np.ndarray]]]] = {}
        self._refused = 0
        self._closing = threading.Event()
        arguments = weakref.ref(self), self._lines, self._closing
        self._thread = threading.Thread(target=_serve, args=arguments, name="tfdist-quorum", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._closing.set).atexit = False

    def offer(self, rounds: str, source: StateSource) -> None:
        """Answers requests for the state of rounds from now on.

        Args:
            rounds: name of the rounds.
            source: object that has the state; the caller must keep it alive.
        """
        self._sources[rounds] = source

    # Sending.

    def send(self, address: str, message: Message, array: np.ndarray) -> None:
        """Sends a piece without waiting.

        Args:
            address: ``host:port`` of the receiver.
            message: an `ArrayPiece`.
            array: contents of the piece, which must not change any more.
        """
        with self._sending:
            if address not in self._to:
                self._to[address] = self._lines.connect(address)
            self._to[address].send(CODEC.encode(message, [array]))
        self.messages_sent += 1
        self.bytes_sent += array.nbytes

    def keep(self, addresses: Sequence[str]) -> None:
        """Closes the connections to all processes but these.

        Args:
            addresses: ``host:port`` of each process whose connection is kept.
        """
        with self._sending:
            for address in self._to.keys() - set(addresses):
                self._lines.end(self._to.pop(address))

    def fetch(
        self, address: str, rounds: str, seconds: float, goes_on: Callable[[], bool]
    ) -> tuple[FetchedState, list[np.ndarray]] | None:
        """Fetches a state from another process.

        Args:
            address: ``host:port`` of a process that has the state.
            rounds: name of the rounds.
            seconds: maximum time to wait, in seconds.
            goes_on: asked again and again whether the other process is there; what it raises ends the wait.

        Returns:
            The state, and its arrays; None if none came in time, or the other process is not there any more.
        """
        request = FetchState(next(self._numbers), rounds)
        end = time.monotonic() + seconds
        line = self._lines.connect(address)
        try:
            line.send(CODEC.encode(request))
            while time.monotonic() < end and goes_on():
                if line.poll(_LOOK_SECONDS):
                    message, arrays = CODEC.decode(line.receive())
                    if isinstance(message, FetchedState) and message.id == request.id:
                        return None if message.round < 0 else (message, [np.array(array) for array in arrays])
        except InvalidMessageError as error:
            log.warning("tfdist: the task at %s sent an invalid state: %s", address, error)
        finally:
            self._lines.end(line)
        return None

    # Receiving.

    def pieces(self, rounds: str, attempt: int) -> list[tuple[ArrayPiece, np.ndarray]]:
        """Returns the pieces of a meeting that have arrived so far, and forgets those of earlier meetings.

        The caller holds ``arrived``.

        Args:
            rounds: name of the rounds.
            attempt: number of the meeting.

        Returns:
            Pieces in the order of arrival, which are no longer kept here.
        """
        kept = self._pieces.setdefault(rounds, {})
        for earlier in [number for number in kept if number < attempt]:
            del kept[earlier]
        return kept.pop(attempt, [])

    def take(self, peer: bytes, frames: Sequence[Any]) -> None:
        """Handles a message from another process; on the thread that serves the socket.

        Args:
            peer: identity of the sender's socket.
            frames: frames of the message.
        """
        try:
            message, arrays = CODEC.decode(frames)
        except InvalidMessageError as error:
            if self._refused < _LOGGED:
                log.warning("tfdist: task %d ignores an invalid message: %s", self._task, error)
            self._refused += 1
            return
        if isinstance(message, ArrayPiece) and len(arrays) == 1 and self._may_be_known(message.rounds):
            with self.arrived:
                of_rounds = self._pieces.setdefault(message.rounds, {})
                of_rounds.setdefault(message.attempt, []).append((message, arrays[0]))
                self.arrived.notify_all()
        elif isinstance(message, FetchState):
            self._answer(peer, message)

    def _may_be_known(self, rounds: str) -> bool:
        """Returns whether to keep pieces of rounds. Only a few names whose state is not offered here are accepted."""
        return rounds in self._sources or rounds in self._pieces or len(self._pieces) < len(self._sources) + _UNKNOWN

    def _answer(self, peer: bytes, message: FetchState) -> None:
        source = self._sources.get(message.rounds)
        try:
            state, arrays = (FetchedState(message.id, -1), []) if source is None else source.state(message.id)
        except Exception as error:  # the other process then asks elsewhere
            log.warning("tfdist: task %d could not send its state of %s: %s", self._task, message.rounds, error)
            state, arrays = FetchedState(message.id, -1), []
        self._lines.answering.answer(peer, CODEC.encode(state, arrays))
        self.bytes_sent += sum(array.nbytes for array in arrays)

    def close(self) -> None:
        """Closes all connections, as the garbage collector does too."""
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)


class _Lines:
    """The sockets of `Links`.

    Args:
        host: host at which others reach this process.
        keys: encryption keys of the job; None for no encryption.

    Attributes:
        answering: socket on which this process answers others.
        address: ``host:port`` of that socket.
    """

    def __init__(self, host: str, keys: Keys | None) -> None:
        self._keys = keys
        self._context = zmq.Context(1)
        options = self._context, f"{host}:0", keys, (zmq.RCVHWM, 0)
        self.answering, self.address = Line.listening(*options, whose="this task")
        self._open = [self.answering]

    def connect(self, address: str) -> Line:
        """Opens a connection to another process.

        Args:
            address: ``host:port`` of the other process.
        """
        made = Line.to(self._context, address, self._keys)
        self._open.append(made)
        return made

    def end(self, line: Line) -> None:
        """Closes a connection."""
        self._open.remove(line)
        line.close()

    def close(self) -> None:
        """Closes all sockets before the context. In the order in which Python may close them at exit, it would hang."""
        while self._open:
            self._open.pop().close()
        self._context.term()


def _serve(reference: weakref.ref[Links], lines: _Lines, is_closing: threading.Event) -> None:
    """Answers other processes until the links are closed or deleted."""
    while not is_closing.is_set():
        if lines.answering.poll(_LOOK_SECONDS):
            of_message = lines.answering.receive_from()
            if (links := reference()) is not None:
                links.take(*of_message)
            del links
    lines.close()
