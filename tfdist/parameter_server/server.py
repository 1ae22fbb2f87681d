"""A server's socket: it takes messages off it, one after the other, and sends the answers of its shards."""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from tfdist.errors import TfdistError
from tfdist.parameter_server.curve import Keys
from tfdist.parameter_server.messages import FROM_SERVER, FROM_WORKER, Done, Leave, Push, Refused, Share
from tfdist.parameter_server.shard import Answer
from tfdist.parameter_server.shards import Shards
from tfdist.parameter_server.shared_memory import Segment, located
from tfdist.parameter_server.wire import COPIED_BYTES, MAX_FRAME, InvalidMessageError, Message

log = logging.getLogger("tfdist")

_LOGGED = 100
"""Peers whose invalid messages are logged, once each."""


@dataclass
class _Shared:
    """A segment that is shared with a connection.

    Attributes:
        memory: the segment.
        worker: number of its task.
        last: the highest ``id`` of a push whose answer may be in it.
    """

    memory: Segment
    worker: int
    last: int = -1


class Server:
    """Serves shards over TCP, one for each model that is trained.

    The identities of peers are the server's own, as one that a peer chooses could be taken twice: then ZeroMQ is silent
    to the second for ever.

    Args:
        shards: nobody else uses them while this runs.
        address: ``host:port`` to listen at; port 0 takes a free one.
        keys: of the job; None for no encryption.

    Attributes:
        address: ``host:port`` that it listens at.
    """

    def __init__(self, shards: Shards, address: str, keys: Keys | None = None) -> None:
        self._shards = shards
        self._segments: dict[bytes, _Shared] = {}
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.LINGER, 1000), (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.ROUTER_MANDATORY, 1)):
            self._socket.setsockopt(option, value)
        self._socket.copy_threshold = COPIED_BYTES
        self._socket.setsockopt(zmq.SNDHWM, 0)  # at a high-water mark a ROUTER would drop answers silently
        if keys is not None:
            keys.secure_server(self._socket)
        try:
            self.address = _bind(self._socket, address)
        except TfdistError:
            self._socket.close()
            self._context.term()
            raise
        self._lost: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._complained: set[str] = set()

    def run(self) -> None:
        """Serves until `stop`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._milliseconds()))
                if self._wake.fileno() in ready:
                    self._wake.recv(1)
                    worker = self._lost.get()
                    if worker is None:
                        return
                    self._shards.lost(worker)
                    self._segments = {peer: one for peer, one in self._segments.items() if one.worker != worker}
                if self._socket in ready:
                    self._receive()
                for one in (*self._shards, *self._shards.tables):
                    if one.snapshots is not None and not one.snapshots.seconds_left:
                        one.take_snapshot()
        finally:
            self._shards.close()
            self._socket.close()
            self._context.term()
            self._wake.close()
            self._waker.close()

    def _milliseconds(self) -> int | None:
        """Until the next snapshot."""
        kept = [one.snapshots for one in (*self._shards, *self._shards.tables)]
        left = [snapshots.seconds_left for snapshots in kept if snapshots is not None]
        return 1 + int(1000 * min(left)) if left else None

    def lost(self, worker: int) -> None:
        """Tells the shard of a worker that is lost; from any thread.

        Args:
            worker: its task's number.
        """
        self._tell(worker)

    def stop(self) -> None:
        """Ends `run`; from any thread."""
        self._tell(None)

    def _tell(self, lost: int | None) -> None:
        self._lost.put(lost)
        with contextlib.suppress(OSError):  # it has ended already
            self._waker.send(b"\0")

    def _receive(self) -> None:
        identity, *received = self._socket.recv_multipart(copy=False)
        peer = identity.bytes
        frames = [frame.buffer for frame in received]
        try:
            locator = located(frames)
            shared = self._segments.get(peer)
            if locator is not None and shared is None:
                why = "this server was started again and has mapped no segment"
                self._send(peer, FROM_SERVER.encode(Refused(locator.id, why, is_unknown=True)))
                return
            if locator is not None and shared is not None:
                frames = shared.memory.restored(locator, frames[1], is_answer=False)
            message, arrays = FROM_WORKER.decode(frames)
        except InvalidMessageError as error:
            self._complain(received, error)
            return
        slot = None
        if shared is not None and isinstance(message, Push) and message.id > shared.last:
            shared.last = message.id  # an answer that comes twice would change memory that its worker reads
            slot = message.sequence % shared.memory.slots

        def answer(message: Message, arrays: Sequence[np.ndarray]) -> None:
            encoded = FROM_SERVER.encode(message, arrays)
            if shared is not None and slot is not None:
                encoded = shared.memory.moved(slot, encoded, is_answer=True)
            self._send(peer, encoded)

        if isinstance(message, Share):
            self._share(peer, message, answer)
            return
        self._shards.heard(peer, message, arrays, answer)
        if isinstance(message, Leave):
            self._segments.pop(peer, None)

    def _send(self, peer: bytes, frames: Sequence[Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone; it asks again when it is back
            self._socket.send_multipart([peer, *frames], copy=False)

    def _share(self, peer: bytes, message: Share, answer: Answer) -> None:
        try:
            segment = Segment.open(message.name, message.area, message.slots)
        except (ValueError, OverflowError) as error:
            answer(Refused(message.id, str(error)), ())
            return
        self._segments[peer] = _Shared(segment, message.worker)
        answer(Done(message.id, 0), ())

    def _complain(self, frames: Sequence[zmq.Frame], error: InvalidMessageError) -> None:
        try:
            peer = str(frames[-1].get("Peer-Address"))
        except (IndexError, zmq.ZMQError):
            peer = "an unknown peer"
        if peer not in self._complained and len(self._complained) < _LOGGED:
            self._complained.add(peer)
            log.warning("tfdist: the parameter server ignores invalid messages of %s: %s", peer, error)


def _bind(bound: zmq.Socket[bytes], address: str) -> str:
    """Has a socket listen at an address, or, where that is not this machine's own, at all of the machine's.

    Returns:
        The address by which others reach it.

    Raises:
        TfdistError: the host cannot be resolved, or the port is in use or not allowed.
    """
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise TfdistError(f"the parameter server's own address {address} cannot be resolved ({error})") from None
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
            f"the parameter server cannot listen at {address}: {error.strerror}. If another process uses the port, end "
            "that one (`ss -ltnp` shows it) or give the server another port, on every task."
        ) from None
    endpoint = bytes(bound.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
    return f"{host}:{endpoint.rpartition(':')[2]}"
