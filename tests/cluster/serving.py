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

import msgspec

from tfdist._version import __version__
from tfdist.cluster import messages, proof, rendezvous
from tfdist.cluster.control import Control
from tfdist.cluster.message import RendezvousMessage
from tfdist.cluster.messages import Claims
from tfdist.cluster.server import JobDescription, RendezvousServer
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
            "tasks": tuple(f"worker {rank} (host{rank}:2222)" for rank in range(size)),
            "size": size,
            "is_elastic": False,
            "digest": DIGEST,
            "version": __version__,
            "secret": SECRET.decode(),
            "start_timeout": DEADLINE,
            "heartbeat_timeout": DEADLINE,
        }
        self.server = RendezvousServer(JobDescription(**{**described, **settings}))
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
    """Serves a job of so many tasks; further arguments are those of `tfdist.cluster.server.JobDescription`."""
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


def claims_of(task: int | None, **changed: Any) -> Claims:
    """What a task states about itself."""
    claims = Claims(task, f"worker {task}", __version__, DIGEST, hostname=f"host{task}", pid=1000 + (task or 0))
    return msgspec.structs.replace(claims, **changed)


class Task:
    """One end of a connection to a server, which sends what a test wants."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=DEADLINE)
        self._lines = self.socket.makefile("rb")
        self._end = time.monotonic() + DEADLINE

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def line(self) -> bytes:
        """The next line; empty at the end of the connection."""
        assert time.monotonic() < self._end, "what is waited for does not come"
        try:
            return self._lines.readline()
        except ConnectionError:
            return b""

    def hear(self) -> messages.FromServer | None:
        """The next message; None at the end of the connection."""
        line = self.line()
        return messages.from_server(line) if line else None

    def wait_for(self, kind: type[RendezvousMessage]) -> Any:
        """The next message of a type."""
        while (message := self.hear()) is not None:
            if isinstance(message, kind):
                return message
        raise AssertionError(f"the connection ended before {kind.__name__}")

    def reply(self, request: int | None = None) -> Any:
        """The value of the reply to a request; by default of the next one to any."""
        while (message := self.wait_for(messages.Reply)).id != request and request is not None:
            pass
        return message.value if message.error is None else message

    def say(self, message: RendezvousMessage) -> None:
        self.socket.sendall(messages.encode(message))

    def knock(self, claims: Claims, secret: bytes = SECRET, proven: Claims | None = None) -> messages.Answer | None:
        """Proves itself; returns the answer. ``proven`` are the claims of the proof, if others than are made."""
        self.nonces = (messages.challenge(self.line()).nonce, proof.nonce())
        proved = proof.prove(secret, "task", self.nonces, claims if proven is None else proven)
        self.say(messages.Hello(claims, self.nonces[1], proved))
        line = self.line()
        return messages.answer(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


def enter(address: str, task: int, **claims: Any) -> Task:
    """A task that was admitted."""
    entered = Task(address)
    answer = entered.knock(claims_of(task, **claims))
    assert isinstance(answer, messages.Welcome), answer
    return entered


def bind(tasks: list[Task]) -> list[Any]:
    """Has tasks start MPI together, as far as the server knows."""
    everyone = tuple(range(len(tasks)))
    for rank, task in enumerate(tasks):
        task.say(messages.GatherValues(999, "bind", everyone, rank, binds=True))
    return [task.reply(999) for task in tasks]


def control(address: str, task: int, secret: bytes = SECRET, **timeouts: float) -> Control:
    """A connection that is not open yet."""
    return Control(address, claims_of(task), secret, Timeouts(**{"start": DEADLINE, **timeouts}))


def enter_and_bind(client: Control, size: int) -> list[Any]:
    """Enters the job as one of its ranks; returns the number of each."""
    client.enter()
    return client.bind(client.task, size)


@contextlib.contextmanager
def connected(address: str, size: int = 2) -> Iterator[list[Control]]:
    """All ranks of a job, once they depend on each other."""
    controls = [control(address, rank) for rank in range(size)]
    entering = [threading.Thread(target=enter_and_bind, args=(client, size), daemon=True) for client in controls]
    for thread in entering:
        thread.start()
    try:
        for thread in entering:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        yield controls
    finally:
        for client in controls:
            client.close()
