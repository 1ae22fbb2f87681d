"""ZeroMQ sockets with the options that parameter servers, workers and peers of a quorum have in common.

With keys, no frame on the wire has more than 64 KiB: ZeroMQ allocates memory for a frame of any announced length, and
reads the frame, before the sender has proved that it knows the secret. A longer frame travels in *parts*, all of which
but the last one are full. This is also faster: parts are decrypted while others arrive.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from tfdist.cluster import hosts
from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.curve import OVERHEAD_BYTES, Keys

MAX_FRAME = 1 << 36
"""Maximum bytes of a frame without keys: 64 GiB."""

MAX_ENCRYPTED = 1 << 16
"""Maximum bytes of an encrypted frame on the wire."""

_PART = MAX_ENCRYPTED - OVERHEAD_BYTES

_MORE, _LAST = int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.DONTWAIT)
"""Flags of the frames of a message before its last one, and of the last one."""

_COPIED_BYTES = 1 << 18
"""Frames with fewer bytes are copied: that costs less than ZeroMQ's callback, which frees memory after it is sent."""


class Line:
    """A socket whose messages consist of frames of any length.

    Args:
        context: ZeroMQ context of the socket.
        kind: type of the socket, as ZeroMQ numbers them.
        keys: keys of the job; None sends without encryption.
        options: options of the socket, in addition to those that all sockets have.

    Attributes:
        socket: ZeroMQ socket, for polling.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: Keys | None, *options: tuple[int, int]
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        limit = MAX_FRAME if keys is None else MAX_ENCRYPTED
        # At a high-water mark a ROUTER would drop answers silently.
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, limit), (zmq.SNDHWM, 0), *options):
            self.socket.setsockopt(option, value)
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
        """Listens at all addresses that a host's name has, or on all interfaces; see `tfdist.cluster.hosts`.

        The socket chooses the identities of its peers. If peers chose them, two could take the same one, and ZeroMQ
        would never answer the second.

        Args:
            context: ZeroMQ context of the socket.
            address: ``host:port``; port 0 takes a free one.
            keys: keys of the job; None sends without encryption.
            options: options of the socket, in addition to those that all sockets have.
            whose: name of the process whose address this is, for messages.

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
        """Connects to a listening socket, as soon as it listens, and again if the connection breaks.

        Args:
            context: ZeroMQ context of the socket.
            address: ``host:port`` of the listening socket.
            keys: keys of the job; None sends without encryption.
        """
        made = cls(context, zmq.DEALER, keys, (zmq.RECONNECT_IVL, 50), (zmq.IPV6, _version_of(address)))
        if keys is not None:
            keys.secure_client(made.socket)
        made.socket.connect(f"tcp://{address}")
        return made

    def send(self, frames: Sequence[Any]) -> None:
        """Sends a message. Without a connection, for example while ZeroMQ reconnects, it may get lost.

        Args:
            frames: bytes, or objects with a buffer, which must not change until the message has arrived.
        """
        sent = list(_parts(frames)) if self._has_parts else frames
        with contextlib.suppress(zmq.Again):
            for place, frame in enumerate(sent, 1):
                flags = _LAST if place == len(sent) else _MORE
                self.socket.send(frame, flags, copy=memoryview(frame).nbytes < _COPIED_BYTES)

    def answer(self, peer: bytes, frames: Sequence[Any]) -> None:
        """Sends a message to a connected peer. A peer that is gone asks again when it is back.

        Args:
            peer: identity of the peer, as `receive_from` returned it.
            frames: bytes or objects with a buffer, as in `send`.
        """
        with contextlib.suppress(zmq.ZMQError):
            self.send([peer, *frames])

    def receive(self) -> list[Any]:
        """Waits for a message.

        Returns:
            The buffers of its frames.
        """
        frame = self.socket.recv(copy=False)
        frames = [frame.buffer]
        while frame.more:
            frame = self.socket.recv(copy=False)
            frames.append(frame.buffer)
        self._last = frame
        return list(_whole(frames)) if self._has_parts else frames

    def receive_from(self) -> tuple[bytes, list[Any]]:
        """Waits for a message; returns the identity of its sender, and its frames."""
        peer, *frames = self.receive()
        return bytes(peer), frames

    @property
    def last_address(self) -> str:
        """Address that the last message came from, to be shown to people."""
        try:
            peer = "an unknown peer" if self._last is None else str(self._last.get("Peer-Address"))
        except zmq.ZMQError:
            return "an unknown peer"
        return peer.removeprefix("::ffff:")  # of IPv4, where the socket listens at addresses of IPv6, too

    def poll(self, seconds: float) -> bool:
        """Waits until there is a message.

        Args:
            seconds: maximum time to wait.

        Returns:
            Whether there is a message.
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
    """Yields the frames that parts make up; of an incomplete last frame, the parts that are there."""
    begin = 0
    for place, part in enumerate(parts, 1):
        if len(part) < _PART or place == len(parts):
            yield part if place == begin + 1 else b"".join(parts[begin:place])
            begin = place


def _version_of(address: str) -> int:
    """Returns 1 where a host is reached by IPv6, or not known yet, and 0 where it is reached by IPv4."""
    try:
        return int(hosts.addresses_of(address)[0][0] != socket.AF_INET)
    except OSError:
        return 1


def _bind(bound: zmq.Socket[bytes], address: str, whose: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        own = hosts.to_listen_at(address)
    except OSError as error:
        raise TfdistError(f"{whose}'s own address {address} cannot be resolved ({error})") from None
    if not own or any(family == socket.AF_INET6 for family, _ in own):
        bound.setsockopt(zmq.IPV6, 1)
    try:
        for family, number in own or [(socket.AF_UNSPEC, "*")]:
            bound.bind(f"tcp://[{number}]:{port}" if family == socket.AF_INET6 else f"tcp://{number}:{port}")
            port = bytes(bound.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0").rpartition(":")[2]
    except zmq.ZMQError as error:
        raise TfdistError(
            f"{whose} cannot listen at {address}: {error.strerror}. If another process uses the port, end that process "
            "(`ss -ltnp` shows it), or choose another port, on every task."
        ) from None
    return f"{host}:{port}"
