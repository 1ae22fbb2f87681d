"""Accepts connections to the rendezvous server, and limits those that have not proven that they belong to the job."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tfdist.cluster import descriptors

_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = 0.05
_MOST_UNPROVEN = 256
_FEWEST_UNPROVEN = 8
_OWN_DESCRIPTORS = 32

Member = TypeVar("Member")


class Admission(Generic[Member]):
    """Admits tasks, and bounds the time, memory and file descriptors that other connections can use.

    Args:
        admit: function that performs the handshake; returns None if the peer is not a task of the job.
        serve: function that receives the messages of an admitted task, until its connection ends.
        tasks: number of tasks.
        line_bytes: maximum bytes that are buffered before the handshake has ended.
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
        allowed = descriptors.raise_file_limit()
        left = _MOST_UNPROVEN if allowed is None else allowed - tasks - _OWN_DESCRIPTORS
        self._most = max(_FEWEST_UNPROVEN, min(_MOST_UNPROVEN, left))
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._sessions: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket) -> None:
        """Accepts connections, until cancelled.

        When too many connections have not proven anything yet, the oldest of them is closed. A real task needs only
        milliseconds for its proof, and if its connection is closed, connects again.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # the peer has closed the connection already, or no file descriptor is free
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if len(self._unproven) >= self._most:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
                await asyncio.sleep(0)  # lets the cancelled session close its connection
            session = loop.create_task(self._receive(connection))
            self._unproven[session] = None
            self._sessions.add(session)
            session.add_done_callback(self._sessions.discard)

    def close(self) -> None:
        """Ends all sessions."""
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
            member = None  # not a task's handshake, so it gets no answer
        except BaseException:
            writer.close()
            raise
        finally:
            self._unproven.pop(session, None)
        if member is None:
            writer.close()
        else:
            await self._serve(member, reader)
