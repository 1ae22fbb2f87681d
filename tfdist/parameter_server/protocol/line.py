"""A ZeroMQ socket of parameter servers, workers, and processes that meet: what all of them have in common.

With keys no frame on the way has more than 64 KiB: ZeroMQ finds memory for a frame of whatever length a stranger
announces, and reads it, before there is proof that this is no stranger. A longer frame travels in *parts*, all of which
but the last one are full. That is the faster way, too: parts are decrypted while others arrive.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.curve import OVERHEAD_BYTES, Keys

MAX_FRAME = 1 << 36
"""Maximum bytes of a frame without keys: 64 GiB."""

MAX_ENCRYPTED = 1 << 16
"""Maximum bytes of a frame with keys, as it travels."""

_PART = MAX_ENCRYPTED - OVERHEAD_BYTES

_COPIED_BYTES = 1 << 18
"""Smaller frames are copied: ZeroMQ's own way back, which frees memory when it is sent, costs more."""


class Line:
    """A socket, whose messages are frames of any length.

    Args:
        context: of the socket.
        kind: of it, as ZeroMQ numbers them.
        keys: of the job; None for no encryption.
        options: of the socket, beside those that all have.

    Attributes:
        socket: to wait for.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: Keys | None, *options: tuple[int, int]
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        limit = MAX_FRAME if keys is None else MAX_ENCRYPTED
        # At a high-water mark a ROUTER would drop answers silently.
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, limit), (zmq.SNDHWM, 0), *options):
            self.socket.setsockopt(option, value)
        self.socket.copy_threshold = _COPIED_BYTES
        self._has_parts = keys is not None
        self._last: zmq.Frame | None = None

    @classmethod
    def listening(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: Keys | None,
        *options: tuple[int, int],
        whose: str = "the parameter server",
    ) -> tuple[Line, str]:
        """Listens at an address, or, where that is not this machine's own, at all of the machine's.

        The identities of peers are the socket's own, as one that a peer chooses could be taken twice: then ZeroMQ is
        silent to the second for ever.

        Args:
            context: of the socket.
            address: ``host:port``; port 0 takes a free one.
            keys: of the job; None for no encryption.
            options: of the socket.
            whose: address it is, for messages.

        Returns:
            The line, and the address by which others reach it.

        Raises:
            TfdistError: the host cannot be resolved, or the port is in use or not allowed.
        """
        made = cls(context, zmq.ROUTER, keys, (zmq.ROUTER_MANDATORY, 1), *options)
        if keys is not None:
            keys.secure_server(made.socket)
        try:
            return made, _bind(made.socket, address, whose)
        except TfdistError:
            made.close()
            raise

    @classmethod
    def to(cls, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None) -> Line:
        """Connects to one that listens, as soon as it does, and again if it has to.

        Args:
            context: of the socket.
            address: ``host:port`` of it.
            keys: of the job; None for no encryption.
        """
        made = cls(context, zmq.DEALER, keys, (zmq.RECONNECT_IVL, 50), (zmq.IPV6, int("[" in address)))
        if keys is not None:
            keys.secure_client(made.socket)
        made.socket.connect(f"tcp://{address}")
        return made

    def send(self, frames: Sequence[Any]) -> None:
        """Sends a message. Without a connection, for example while ZeroMQ retries, it may get lost.

        Args:
            frames: bytes, or objects with a buffer, which must not change until the message has arrived.
        """
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(list(_parts(frames)) if self._has_parts else frames, zmq.DONTWAIT, copy=False)

    def answer(self, peer: bytes, frames: Sequence[Any]) -> None:
        """Sends a message to one of those that have connected. One that is gone asks again when it is back.

        Args:
            peer: as `receive_from` gave it.
            frames: as of `send`.
        """
        with contextlib.suppress(zmq.ZMQError):
            self.send([peer, *frames])

    def receive(self) -> list[Any]:
        """Waits for a message.

        Returns:
            Its frames, with buffers.
        """
        received = self.socket.recv_multipart(copy=False)
        self._last = received[-1]
        frames = [frame.buffer for frame in received]
        return list(_whole(frames)) if self._has_parts else frames

    def receive_from(self) -> tuple[bytes, list[Any]]:
        """As `receive`, with the peer that it came from."""
        peer, *frames = self.receive()
        return bytes(peer), frames

    @property
    def last_address(self) -> str:
        """Where the last message came from, for messages to people."""
        try:
            return "an unknown peer" if self._last is None else str(self._last.get("Peer-Address"))
        except zmq.ZMQError:
            return "an unknown peer"

    def poll(self, seconds: float) -> bool:
        """Waits until there is a message.

        Args:
            seconds: to wait at most.

        Returns:
            Whether there is one.
        """
        return bool(self.socket.poll(int(1000 * seconds)))

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()


def _parts(frames: Sequence[Any]) -> Iterator[Any]:
    for frame in frames:
        view, begin = memoryview(frame), 0
        while len(view) - begin >= _PART:
            yield view[begin : begin + _PART]
            begin += _PART
        yield view[begin:]


def _whole(parts: Sequence[Any]) -> Iterator[Any]:
    """The frames that parts were; of what is no whole frame, what there is."""
    begin = 0
    for place, part in enumerate(parts, 1):
        if len(part) < _PART or place == len(parts):
            yield part if place == begin + 1 else b"".join(parts[begin:place])
            begin = place


def _bind(bound: zmq.Socket[bytes], address: str, whose: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter of a name that no name can be
        raise TfdistError(f"{whose}'s own address {address} cannot be resolved ({error})") from None
    numeric = f"[{target[0]}]" if family == socket.AF_INET6 else target[0]
    bound.setsockopt(zmq.IPV6, int(family == socket.AF_INET6))
    try:
        try:
            bound.bind(f"tcp://{numeric}:{port}")
        except zmq.ZMQError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
            bound.bind(f"tcp://*:{port}")
    except zmq.ZMQError as error:
        raise TfdistError(
            f"{whose} cannot listen at {address}: {error.strerror}. If another process uses the port, end that one "
            "(`ss -ltnp` shows it) or give it another port, on every task."
        ) from None
    endpoint = bytes(bound.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
    return f"{host}:{endpoint.rpartition(':')[2]}"
