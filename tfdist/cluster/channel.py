"""A task's open connection to the rendezvous server: requests and replies, heartbeats, and the listening thread."""

from __future__ import annotations

import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.cluster import messages
from tfdist.cluster.interrupts import INTERRUPTED, InterruptWatch
from tfdist.cluster.message import RendezvousMessage
from tfdist.errors import PeerLostError, RendezvousError, TfdistError

_LATE_SECONDS = 1.0


class RequestTimeoutError(RendezvousError):
    """The rendezvous server did not answer in time: other tasks did not make their request, or the link is cut."""


class RequestRefusedError(RendezvousError):
    """The rendezvous server, or another task, has refused a request."""


class Channel:
    """An open connection to the rendezvous server.

    Args:
        address: ``host:port`` of the server, for error messages.
        heard: callback, called on the listening thread with every message that is not a reply.
        failed: callback, called on the listening thread when the connection is broken or the user has interrupted the
            process, with the error and whether the server closed the connection.
        heartbeat: seconds without a message after which the server counts as lost.

    Attributes:
        arrived: condition that is notified when something has changed that a request may wait for.
        failure: the error because of which this process cannot go on; requests raise it.
    """

    def __init__(
        self,
        address: str,
        heard: Callable[[messages.FromServer], None],
        failed: Callable[[TfdistError, bool], None],
        heartbeat: float,
    ) -> None:
        self.arrived = threading.Condition()
        self.failure: TfdistError | None = None
        self._address = address
        self._on_message = heard
        self._on_failure = failed
        self._heartbeat = heartbeat
        self._interrupts = InterruptWatch()
        self._numbers = itertools.count()
        self._replies: dict[int, messages.Reply] = {}
        self._on_reply: dict[int, tuple[Callable[[Any], None], Callable[[str], None]]] = {}
        self._sending = threading.Lock()
        self._closing = False
        self._has_ended = False
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    def open(self, connection: socket.socket) -> None:
        """Starts the listening thread.

        Args:
            connection: socket over which this task was admitted.
        """
        self._socket = connection
        self._thread = threading.Thread(target=self._listen, name="tfdist-control", daemon=True)
        self._thread.start()

    def after_fork(self) -> None:
        """Closes a child process's copy of the connection, which must end when the parent does."""
        self._closing = True
        if self._socket is not None:
            self._socket.close()

    def close(self) -> None:
        """Closes the connection."""
        self._closing = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            if self._thread and self._thread is not threading.current_thread():
                self._thread.join(5.0)
            self._socket.close()
        self._interrupts.close()

    def send(self, message: RendezvousMessage) -> None:
        """Sends a message without a reply. If that fails the message is lost; the listening thread reports why."""
        if self._socket is None:
            return
        try:
            with self._sending:
                self._socket.sendall(messages.encode(message))
        except OSError:
            pass

    def request(
        self,
        make: Callable[[int], RendezvousMessage],
        timeout: float,
        late: Callable[[float], None] | None = None,
    ) -> Any:
        """Sends a message and waits for its reply.

        Args:
            make: function that returns the message with the given ``id``.
            timeout: seconds to wait for the reply.
            late: callback, called about every second while there is no reply, with the seconds waited so far.

        Returns:
            The reply's value.

        Raises:
            RequestTimeoutError: there was no reply in time.
            TfdistError: the job failed.
        """
        number = next(self._numbers)
        message = make(number)
        self.send(message)
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < timeout:
            with self.arrived:
                step = min(_LATE_SECONDS, timeout - waited)
                self.arrived.wait_for(lambda: number in self._replies or self.failure or self._has_ended, step)
                if number in self._replies:
                    return _value(self._replies.pop(number))
            if self.failure:
                raise self.failure
            if self._has_ended:
                raise TfdistError("the job is over: its rendezvous server has ended")
            if late:
                try:
                    late(time.monotonic() - begin)
                except TfdistError:
                    with self.arrived:  # the error may be about something that came after the reply
                        if number in self._replies:
                            return _value(self._replies.pop(number))
                    raise
        raise RequestTimeoutError(f"no answer to {message} within {timeout:g} s from the rendezvous server")

    def ask(
        self,
        make: Callable[[int], RendezvousMessage],
        then: Callable[[Any], None],
        refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Sends a message and returns at once.

        Args:
            make: function that returns the message with the given ``id``.
            then: callback, called on the listening thread with the reply's value.
            refused: callback, called instead with the reason if the request was refused.
        """
        number = next(self._numbers)
        self._on_reply[number] = then, refused
        self.send(make(number))

    def notify(self) -> None:
        """Wakes waiting requests, so that they check again whether they can go on."""
        with self.arrived:
            self.arrived.notify_all()

    # Listening.

    def _listen(self) -> None:
        try:
            self._listen_until_closed()
        except Exception as error:  # without this thread nothing would be noticed any more
            if self._closing:
                return
            failure = PeerLostError(
                f"the rendezvous server at {self._address} sent an invalid message ({type(error).__name__}: {error}): "
                "its connection is broken. Start the job again."
            )
            self.send(messages.ReportFailure(str(failure)[:1000], mismatch=False))
            self._on_failure(failure, False)
        finally:
            self._has_ended = True
            self.notify()

    def _listen_until_closed(self) -> None:
        assert self._socket is not None
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        if self._interrupts.active:
            selector.register(self._interrupts, selectors.EVENT_READ)
        pending = b""
        pinged = looked = time.monotonic()
        silence = 0.0
        while not self._closing:
            events = selector.select(messages.HEARTBEAT_SECONDS)
            now = time.monotonic()
            silence += min(now - looked, 2 * messages.HEARTBEAT_SECONDS)  # ignores times when the process was stopped
            looked = now
            if now - pinged >= messages.HEARTBEAT_SECONDS:
                self.send(messages.Ping())
                pinged = now
            for key, _ in events:
                if key.fileobj is self._interrupts:
                    if self._interrupts.interrupted():
                        self._on_failure(TfdistError(INTERRUPTED), False)
                    continue
                try:
                    chunk = self._socket.recv(1 << 16)
                except OSError:
                    chunk = b""
                if not chunk:
                    if not self._closing:
                        self._on_failure(self._gone(), True)
                    return
                silence = 0.0
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._receive(messages.from_server(line))
                if len(pending) > messages.MAX_LINE:
                    raise ValueError("a line is longer than the maximum")
            if silence > self._heartbeat:
                self._on_failure(
                    PeerLostError(
                        f"the rendezvous server at {self._address}, on the chief's machine, gave no sign of life for "
                        f"{silence:.0f} s: that machine is down, or the link to it is cut."
                    ),
                    False,
                )
                return

    def _gone(self) -> PeerLostError:
        return PeerLostError(
            f"the rendezvous server at {self._address} is gone: its process, on the chief's machine, was killed. "
            "Start the job again."
        )

    def _receive(self, message: messages.FromServer) -> None:
        if isinstance(message, messages.Reply):
            self._replied(message)
        else:
            self._on_message(message)

    def _replied(self, reply: messages.Reply) -> None:
        if reply.id in self._on_reply:
            then, refused = self._on_reply.pop(reply.id)
            if reply.error is None:
                then(reply.value)
            else:
                refused(reply.error)
            return
        with self.arrived:
            self._replies[reply.id] = reply
            self.arrived.notify_all()


def seldom(seconds: float, say: Callable[[], None]) -> Callable[[float], None]:
    """Returns a callback for `Channel.request` that says something at most once in a number of seconds.

    Args:
        seconds: the time between two calls, and before the first.
        say: callback.
    """
    said = 0.0

    def late(waited: float) -> None:
        nonlocal said
        if waited - said > seconds:
            said = waited
            say()

    return late


def _value(reply: messages.Reply) -> Any:
    if reply.error is not None:
        raise RequestRefusedError(reply.error)
    return reply.value
