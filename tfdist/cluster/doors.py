"""Who connects to the rendezvous server, until it has proven that it belongs to the job."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = 0.05
_MOST_STRANGERS = 256
_FEWEST_STRANGERS = 8
_OWN_DESCRIPTORS = 32

Member = TypeVar("Member")


class Doors(Generic[Member]):
    """Lets tasks in, and bounds what all others can take up: time, memory and file descriptors.

    Args:
        admit: has a stranger prove itself; None if it is none of the job's tasks.
        serve: talks with a task that was let in, until its connection ends.
        tasks: how many of them there are.
        line_bytes: what is buffered of a stranger at most.
    """

    def __init__(
        self,
        admit: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Member | None]],
        serve: Callable[[Member, asyncio.StreamReader], Awaitable[None]],
        tasks: int,
        line_bytes: int,
    ) -> None:
        self._admit = admit
        self._serve = serve
        self._line_bytes = line_bytes
        self._most = max(_FEWEST_STRANGERS, min(_MOST_STRANGERS, _descriptors() - tasks - _OWN_DESCRIPTORS))
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._sessions: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket) -> None:
        """Receives whoever comes, until cancelled.

        Where too many wait to prove themselves, the one that has waited longest gives way: a task needs
        milliseconds for it, and comes again.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # it is gone already; or no file descriptor is left, until one comes free
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if len(self._strangers) >= self._most:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
                await asyncio.sleep(0)  # it closes its connection
            session = loop.create_task(self._receive(connection))
            self._strangers[session] = None
            self._sessions.add(session)
            session.add_done_callback(self._sessions.discard)

    def close(self) -> None:
        """Ends the sessions of all."""
        for session in self._sessions:
            session.cancel()

    async def _receive(self, connection: socket.socket) -> None:
        session = asyncio.current_task()
        assert session is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(self._line_bytes, loop)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
        except BaseException:
            connection.close()
            raise
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            member = await asyncio.wait_for(self._admit(reader, writer), _HANDSHAKE_SECONDS)
        except Exception:
            member = None  # noise: whoever it was has not said anything that deserves an answer
        except BaseException:
            writer.close()
            raise
        finally:
            self._strangers.pop(session, None)
        if member is None:
            writer.close()
        else:
            await self._serve(member, reader)


def _descriptors() -> int:
    """How many files this process may have open; as many as it is allowed to allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass
    return _MOST_STRANGERS + (1 << 20) if soft == resource.RLIM_INFINITY else soft
