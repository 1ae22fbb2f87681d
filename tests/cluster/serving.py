"""A rendezvous server on a thread of this process, and tasks that connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tfdist._version import __version__
from tfdist.cluster import rendezvous, wire
from tfdist.cluster.control import Control
from tfdist.cluster.server import Job, Server
from tfdist.cluster.settings import Timeouts

SECRET = b"a secret"
DIGEST = "a cluster"
DEADLINE = 10.0


class Serving:
    """A server under way.

    Attributes:
        address: ``host:port``.
        server: the server itself; only to be read, as it runs on another thread.
        chief: a file descriptor that the chief keeps open as long as it lives.
    """

    def __init__(self, size: int, **settings: Any) -> None:
        described = {
            "name": f"tfdist_test_{os.getpid()}",
            "tasks": [f"worker {rank} (host{rank}:2222)" for rank in range(size)],
            "digest": DIGEST,
            "version": __version__,
            "secret": SECRET.decode(),
            "start_timeout": DEADLINE,
            "heartbeat_timeout": DEADLINE,
        }
        self.server = Server(Job(**{**described, **settings}))
        self._listener = rendezvous.listen("127.0.0.1:0")
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        reading, self.chief = os.pipe()
        self._stdin = os.fdopen(reading)
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._loop.run_until_complete(self.server.run(self._listener))
        self._loop.run_until_complete(asyncio.sleep(0))  # what was cancelled ends
        self._loop.close()

    def ends_by_itself(self) -> bool:
        self.thread.join(DEADLINE)
        return not self.thread.is_alive()

    def close(self) -> None:
        if self.thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.server.over.set)
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
        self.chief_dies()
        self._stdin.close()

    def chief_dies(self) -> None:
        if self.chief >= 0:
            os.close(self.chief)
            self.chief = -1


@contextlib.contextmanager
def serving(size: int = 2, **settings: Any) -> Iterator[Serving]:
    """Serves a job of so many tasks; further arguments are those of `tfdist.cluster.server.Job`."""
    limits, stdin = resource.getrlimit(resource.RLIMIT_NOFILE), sys.stdin
    made = Serving(size, **settings)
    sys.stdin = made._stdin
    made.thread.start()
    try:
        yield made
    finally:
        made.close()
        sys.stdin = stdin
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def claims_of(rank: Any, **changed: Any) -> dict[str, Any]:
    """What a task says of itself."""
    return {
        "rank": rank,
        "version": __version__,
        "digest": DIGEST,
        "hostname": f"host{rank}",
        "pid": 1000 + (rank if isinstance(rank, int) else 0),
        **changed,
    }


class Task:
    """One end of a connection to a server, which says what it is told to say."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=DEADLINE)
        self._lines = self.socket.makefile("rb")
        self._end = time.monotonic() + DEADLINE

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hear(self) -> dict[str, Any] | None:
        """The next message; None at the end of the connection."""
        assert time.monotonic() < self._end, "what is waited for does not come"
        try:
            line = self._lines.readline()
        except ConnectionError:
            return None
        return wire.decode(line) if line else None

    def await_type(self, kind: str) -> dict[str, Any]:
        """The next message of a type."""
        while (message := self.hear()) is not None:
            if message.get("type") == kind:
                return message
        raise AssertionError(f"the connection ended before {kind!r}")

    def await_answer(self, request: int | None = None) -> dict[str, Any]:
        """The answer to a request; by default the next one to any."""
        while (message := self.hear()) is not None:
            if "re" in message and request in (None, message["re"]):
                return message
        raise AssertionError(f"the connection ended before the answer to {request}")

    def say(self, **message: Any) -> None:
        self.socket.sendall(wire.encode(message))

    def knock(self, claims: dict[str, Any], secret: bytes = SECRET, proven: dict[str, Any] | None = None) -> dict:
        """Proves itself; returns the answer. ``proven`` are the claims of the proof, if others than are made."""
        challenge = self.hear()
        assert challenge is not None
        self.nonces = (challenge["nonce"], wire.nonce())
        proof = wire.prove(secret, "task", self.nonces, claims if proven is None else proven)
        self.say(claims=claims, nonce=self.nonces[1], proof=proof)
        answer = self.hear()
        assert answer is not None
        return answer

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


def enter(address: str, rank: int) -> Task:
    """A task that was let in."""
    task = Task(address)
    answer = task.knock(claims_of(rank))
    assert answer.get("welcome") == rank, answer
    return task


def control(address: str, rank: int, secret: bytes = SECRET, **timeouts: float) -> Control:
    """A connection that is not open yet."""
    return Control(address, claims_of(rank), secret, Timeouts(**{"start": DEADLINE, **timeouts}))


@contextlib.contextmanager
def connected(address: str, size: int = 2) -> Iterator[list[Control]]:
    """All tasks of a job, once they have joined."""
    controls = [control(address, rank) for rank in range(size)]
    joining = [threading.Thread(target=one.join, daemon=True) for one in controls]
    for thread in joining:
        thread.start()
    try:
        for thread in joining:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        yield controls
    finally:
        for one in controls:
            one.close()
