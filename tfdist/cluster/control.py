"""A task's connection to the rendezvous server: how it gets in, asks, and learns what became of the others."""

from __future__ import annotations

import itertools
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from tfdist.cluster import wire
from tfdist.cluster.interrupts import InterruptWatch
from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import split_address
from tfdist.errors import MismatchError, PeerLostError, RendezvousError, TfdistError

log = logging.getLogger("tfdist")

_RETRY_SECONDS = 0.1
_PROGRESS_SECONDS = 10.0
_LATE_SECONDS = 1.0


class RequestTimeoutError(RendezvousError):
    """The rendezvous server did not answer in time: other tasks did not ask, or it is cut off."""


class Listener(Protocol):
    """What hears, on the control connection's thread, of other ranks' collectives: the engine."""

    def state(self) -> dict[str, Any]:
        """What this rank has under way."""
        ...

    def rank_joined(self) -> None:
        """Another rank has no more data; it is in `Control.joined`."""
        ...

    def all_joined(self, last: int) -> None:
        """No rank has more data; ``last`` was the last to say so."""
        ...

    def invited(self, call: dict[str, Any]) -> None:
        """This rank, which has joined, is to stand in for itself in a collective."""
        ...

    def survives(self, rank: int, error: TfdistError) -> bool:
        """Whether this process goes on although a rank is lost, as it shares no group with it."""
        ...


class Control:
    """The connection, and one thread that listens to it.

    Args:
        address: ``host:port`` of the rendezvous server.
        claims: what this task says of itself; ``rank`` among it.
        secret: the job's secret, or empty bytes.
        timeouts: how long to wait for the server and the other tasks.

    Attributes:
        job: the job's unique name, once let in.
        failure: why the job cannot go on, as soon as it is known.
        peer_died: whether that is because a process died or cannot be reached; not because of an error that it told.
        fails_first: whether this task is why, by an error of its own.
        departed: by rank, how many calls of each collective a task had made when it ended.
        names: by rank, what a task that ended is called.
        joined: by rank, how many calls of each collective a rank had made when it joined (`Engine.join`).
    """

    def __init__(self, address: str, claims: dict[str, Any], secret: bytes, timeouts: Timeouts) -> None:
        self.address = address
        self.job = ""
        self.failure: TfdistError | None = None
        self.peer_died = False
        self.fails_first = False
        self.departed: dict[int, dict[str, int]] = {}
        self.names: dict[int, str] = {}
        self.joined: dict[int, dict[str, int]] = {}
        self._claims = claims
        self._secret = secret
        self._timeouts = timeouts
        self._interrupts = InterruptWatch()
        self._numbers = itertools.count()
        self._replies: dict[int, dict[str, Any]] = {}
        self._on_reply: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._arrived = threading.Condition()
        self._started: list[dict[str, Any]] | None = None
        self._missing: list[str] = []
        self._refusals_told = 0
        self._listener: Listener | None = None
        self._on_failure: Callable[[TfdistError], None] | None = None
        self._sending = threading.Lock()
        self._all_ended = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    # Getting in.

    def join(self) -> list[dict[str, Any]]:
        """Connects, proves itself and waits until all tasks are there.

        Returns:
            What each task says of itself, by rank.

        Raises:
            RendezvousError: refused, or not all came before the deadline.
        """
        deadline = time.monotonic() + self._timeouts.start
        self._socket = self._connect(deadline)
        self._thread = threading.Thread(target=self._listen, name="tfdist-control", daemon=True)
        self._thread.start()
        told = time.monotonic()
        with self._arrived:
            while self._started is None:
                if self.failure:
                    raise self.failure
                self._arrived.wait(1.0)
                if time.monotonic() - told > _PROGRESS_SECONDS and self._missing:
                    told = time.monotonic()
                    log.warning("tfdist: waiting for %s", ", ".join(self._missing))
            return self._started

    def _connect(self, deadline: float) -> socket.socket:
        host, port = split_address(self.address)
        reason = "no answer"
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RendezvousError(
                    f"the chief at {self.address} could not be reached within {self._timeouts.start:g} s "
                    f"({reason}). Missing: the chief. Start it, see that its address in TF_CONFIG is right and "
                    "reachable from here, or raise TFDIST_START_TIMEOUT."
                )
            try:
                connection = socket.create_connection((host, port), timeout=min(10.0, remaining))
            except OSError as error:
                reason = str(error)
                time.sleep(_RETRY_SECONDS)
                continue
            try:
                self._handshake(connection)
            except OSError as error:
                connection.close()
                reason = f"it closed the connection: {error}"
                time.sleep(_RETRY_SECONDS)
                continue
            except BaseException:
                connection.close()
                raise
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            return connection

    def _handshake(self, connection: socket.socket) -> None:
        challenge = self._read_answer(connection)
        if challenge.get("tfdist") != wire.PROTOCOL:
            raise RendezvousError(
                f"what answers at {self.address} is not this version's rendezvous server (expected protocol "
                f"{wire.PROTOCOL}, got {challenge.get('tfdist')!r}). Install the same tfdist on every task, and see "
                "that nothing else uses the chief's port."
            )
        nonces = (str(challenge.get("nonce")), wire.nonce())
        proof = wire.prove(self._secret, "task", nonces, self._claims)
        connection.sendall(wire.encode({"claims": self._claims, "nonce": nonces[1], "proof": proof}))
        answer = self._read_answer(connection)
        if "refused" in answer:
            raise RendezvousError(f"the chief at {self.address} refused this task: {answer['refused']}")
        proof = answer.pop("proof", None)
        if not wire.proven(proof, wire.prove(self._secret, "server", nonces, answer)):
            raise RendezvousError(
                f"what answers at {self.address} could not prove that it knows the job's secret: it is not this "
                "job's chief. Check the chief's address in TF_CONFIG."
            )
        self.job = answer["job"]

    def _read_answer(self, connection: socket.socket) -> dict[str, Any]:
        """Reads one line, byte by byte: what follows it belongs to the listening thread."""
        connection.settimeout(30.0)
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte:
                raise ConnectionResetError("closed before it answered")
            line += byte
            if len(line) > wire.MAX_HANDSHAKE_LINE:
                break
        try:
            return wire.decode(bytes(line))
        except ValueError:
            raise RendezvousError(
                f"what answers at {self.address} is no rendezvous server of tfdist. See that nothing else uses "
                "the chief's port."
            ) from None

    # Asking.

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message that has no answer. What cannot be sent is lost: the listening thread says why."""
        if self._socket is None:
            return
        try:
            with self._sending:
                self._socket.sendall(wire.encode(message))
        except OSError:
            pass

    def request(
        self,
        kind: str,
        timeout: float | None = None,
        late: Callable[[float], None] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Sends a question and waits for its answer.

        Args:
            kind: one of the server's questions.
            timeout: seconds; the start's deadline by default.
            late: called about every second while there is no answer, with the seconds so far.
            **fields: what the question holds.

        Raises:
            RequestTimeoutError: nobody answered in time.
            TfdistError: the job failed.
        """
        number = next(self._numbers)
        self.send({"type": kind, "id": number, **fields})
        timeout = timeout or self._timeouts.start
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < timeout:
            with self._arrived:
                step = min(_LATE_SECONDS, timeout - waited)
                self._arrived.wait_for(lambda: number in self._replies or self.failure is not None, step)
                if number in self._replies:
                    return self._replies.pop(number)
            if self.failure:
                raise self.failure
            if late:
                try:
                    late(time.monotonic() - begin)
                except TfdistError:
                    with self._arrived:  # it may have objected to what came after the answer
                        if number in self._replies:
                            return self._replies.pop(number)
                    raise
        raise RequestTimeoutError(f"no answer to {kind!r} {fields} within {timeout:g} s from the rendezvous server")

    def ask(self, then: Callable[[dict[str, Any]], None], kind: str, **fields: Any) -> None:
        """Sends a question and goes on.

        Args:
            then: called with the answer, on the listening thread.
            kind: one of the server's questions.
            **fields: what the question holds.
        """
        number = next(self._numbers)
        self._on_reply[number] = then
        self.send({"type": kind, "id": number, **fields})

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, by rank, when all have given theirs.

        Args:
            name: of this exchange, used once.
            value: for JSON.
        """
        return self.request("gather", name=name, value=value)["values"]

    def when_failed(self, callback: Callable[[TfdistError], None] | None) -> None:
        """Calls back, on the listening thread, when the job fails; at once if it has. None ends that."""
        with self._arrived:
            self._on_failure = callback
        if callback and self.failure:
            callback(self.failure)

    def attend(self, listener: Listener | None) -> None:
        """Registers the listener for the server's messages about collectives."""
        self._listener = listener

    def tell_failure(self, error: BaseException) -> None:
        """Tells the other tasks why this one cannot go on."""
        why = str(error) if isinstance(error, TfdistError) else f"{type(error).__name__}: {error}"
        self.send({"type": "fails", "why": why[:1000], "mismatch": isinstance(error, MismatchError)})

    def after_fork(self) -> None:
        """In a child process: the connection is the parent's, and must end with it."""
        self._closing = True
        if self._socket is not None:
            self._socket.close()

    def leave(self, failed: str | None, counts: dict[str, int]) -> None:
        """Announces that this task leaves: how it ended, and how many calls of each collective it has made."""
        self.send({"type": "leave", "failed": failed, "counts": counts})

    def end(self, timeout: float) -> None:
        """Says that this task has taken MPI down, and waits until all have: one that dies before is a failure."""
        self.send({"type": "end"})
        with self._arrived:
            self._arrived.wait_for(lambda: self._all_ended or self.failure is not None, timeout)

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

    # Listening.

    def _listen(self) -> None:
        try:
            self._listen_until_closed()
        except Exception as error:  # without this thread nothing would be noticed any more
            if self._closing:
                return
            failure = PeerLostError(
                f"the rendezvous server at {self.address} sent what this task does not understand "
                f"({type(error).__name__}: {error}): its connection is broken. The job must be started again."
            )
            self.tell_failure(failure)
            self.fail(failure)

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
            events = selector.select(wire.HEARTBEAT_SECONDS)
            now = time.monotonic()
            silence += min(now - looked, 2 * wire.HEARTBEAT_SECONDS)  # not the time for which this process is stopped
            looked = now
            if now - pinged >= wire.HEARTBEAT_SECONDS:
                self.send({"type": "ping"})
                pinged = now
            for key, _ in events:
                if key.fileobj is self._interrupts:
                    if self._interrupts.interrupted():
                        self.fail(TfdistError("interrupted (Ctrl-C)"))
                    continue
                try:
                    chunk = self._socket.recv(1 << 16)
                except OSError:
                    chunk = b""
                if not chunk:
                    self._server_gone()
                    return
                silence = 0.0
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._heard(wire.decode(line))
                if len(pending) > wire.MAX_LINE:
                    raise ValueError("a line without an end")
            if silence > self._timeouts.heartbeat:
                self.fail(
                    PeerLostError(
                        f"the rendezvous server at {self.address}, on the chief's machine, gave no sign of life for "
                        f"{silence:.0f} s: that machine is down, or the link to it is cut."
                    )
                )
                return

    def _server_gone(self) -> None:
        if not self._closing:
            self.peer_died = self.failure is None
            self.fail(
                PeerLostError(
                    f"the rendezvous server at {self.address} is gone: its process, on the chief's machine, was "
                    "killed. The job must be started again."
                )
            )

    def _heard(self, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if then := self._on_reply.pop(message.get("re", -1), None):
            then(message)
        elif "re" in message:
            with self._arrived:
                self._replies[message["re"]] = message
                self._arrived.notify_all()
        elif kind == "start":
            with self._arrived:
                self._started = message["claims"]
                self._arrived.notify_all()
        elif kind == "missing":
            with self._arrived:
                self._missing = message["tasks"]
            waiting = f"; still waiting for {', '.join(self._missing)}" if self._missing else ""
            for who in message["refused"][self._refusals_told :]:
                log.warning("tfdist: refused %s%s", who, waiting)
            self._refusals_told = len(message["refused"])
        elif kind == "left":
            self.names[message["rank"]] = message["name"]
            self.departed[message["rank"]] = message["counts"]
        elif kind == "all ended":
            with self._arrived:
                self._all_ended = True
                self._arrived.notify_all()
        elif kind == "failed":
            self._heard_of_failure(message)
        elif kind == "stall":
            log.warning("tfdist: %s", message["why"])
        else:
            self._heard_of_collectives(message)

    def _heard_of_failure(self, message: dict[str, Any]) -> None:
        error, rank, listener = self._error(message), message["rank"], self._listener
        is_lost = isinstance(error, PeerLostError) and rank is not None
        if is_lost and listener is not None and listener.survives(rank, error):
            log.warning("tfdist: %s This process shares no group with it, and goes on.", error)
            return
        if self.failure is None:
            self.peer_died = message["died"]
        self.fail(error)

    def _heard_of_collectives(self, message: dict[str, Any]) -> None:
        kind, listener = message.get("type"), self._listener
        if kind == "report" and listener:
            self.send({"type": "state", **listener.state()})
        elif kind == "joined":
            self.joined[message["rank"]] = message["counts"]
            if listener:
                listener.rank_joined()
        elif kind == "all joined":
            self.joined = {}
            if listener:
                listener.all_joined(message["last"])
        elif kind == "invited" and listener:
            listener.invited(message)

    def _error(self, message: dict[str, Any]) -> TfdistError:
        if message["kind"] == "mismatch":
            return MismatchError(message["why"])
        if self._started is None:
            return RendezvousError(message["why"])
        return PeerLostError(message["why"])

    def fail(self, error: TfdistError) -> None:
        """The job cannot go on, as far as this task knows; the first reason is the one that counts."""
        with self._arrived:
            if self.failure is None:
                self.failure = error
            callback = self._on_failure
            self._arrived.notify_all()
        if callback:
            callback(error)
