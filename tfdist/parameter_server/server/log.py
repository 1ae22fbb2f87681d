"""A leader's log: entries that go to its follower, and answers that wait until the follower has them."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.line import Line
from tfdist.parameter_server.protocol.wire import InvalidMessageError
from tfdist.parameter_server.server.replication_messages import FROM_FOLLOWER, FROM_LEADER, BeginStream, Entry

_AGAIN_SECONDS = 2.0
"""Seconds after which entries are sent again that the follower has not acknowledged."""


class ReplicationLog:
    """The stream of entries to a follower, for one thread. Without a follower, answers are sent at once.

    Args:
        keys: encryption keys of the job; None sends unencrypted messages.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._keys = keys
        self._context = zmq.Context(1)
        self._line: Line | None = None
        self._stream = 0
        self._number = 0
        self._noted = -1
        self._sent: deque[tuple[int, list[Any]]] = deque()
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._open: list[Callable[[], None]] = []
        self._due = 0.0

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """Socket to poll, whose messages `attend` reads; None without a follower."""
        return None if self._line is None else self._line.socket

    @property
    def is_begun(self) -> bool:
        """Whether the follower has acknowledged the first entry."""
        return self._noted >= 0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `attend` has to send entries again; None if the follower has acknowledged all."""
        return max(0.0, self._due - time.monotonic()) if self._sent else None

    def begin(self, address: str) -> None:
        """Begins a stream to a follower, in place of the stream to an earlier follower.

        Args:
            address: ``host:port`` of the follower.
        """
        self.end()
        self._line = Line.to(self._context, address, self._keys)
        self._stream, self._number, self._noted = secrets.randbits(63), 0, -1
        self.append(BeginStream)

    def end(self) -> None:
        """Ends the stream, and sends all held answers."""
        if self._line is not None:
            self._line.close()
            self._line = None
        self._sent.clear()
        for send in [*(send for _, send in self._held), *self._open]:
            send()
        self._held.clear()
        self._open.clear()

    def append(
        self,
        kind: Callable[..., Entry],
        *attributes: Any,
        arrays: Sequence[np.ndarray] = (),
    ) -> None:
        """Sends an entry. Answers that were held since the last one wait until the follower has acknowledged this one.

        Args:
            kind: class of the entry.
            attributes: values of its attributes after stream and number.
            arrays: arrays of the entry, which must not change until the follower has acknowledged it.
        """
        if self._line is None:
            return
        encoded = FROM_LEADER.encode(kind(self._stream, self._number, *attributes), arrays)
        if not self._sent:
            self._due = time.monotonic() + _AGAIN_SECONDS
        self._sent.append((self._number, encoded))
        self._held.extend((self._number, send) for send in self._open)
        self._open.clear()
        self._number += 1
        self._post(encoded)

    def hold(self, send: Callable[[], None]) -> None:
        """Sends an answer when the follower has acknowledged the entry that is appended next.

        Args:
            send: function that sends the answer.
        """
        if self._line is None:
            send()
        else:
            self._open.append(send)

    def attend(self) -> None:
        """Handles acknowledgements of the follower, and sends entries again that it has not acknowledged in time."""
        while self._line is not None and self._line.poll(0.0):
            try:
                message, _ = FROM_FOLLOWER.decode(self._line.receive())
            except InvalidMessageError:
                continue
            if message.stream == self._stream:
                self._note(message.number)
        if self._sent and time.monotonic() >= self._due:
            self._due = time.monotonic() + _AGAIN_SECONDS
            for _, frames in self._sent:
                self._post(frames)

    def close(self) -> None:
        """Closes the connection, and drops the held answers."""
        self._open.clear()
        self._held.clear()
        self.end()
        self._context.term()

    def _note(self, number: int) -> None:
        if number <= self._noted:
            return
        self._noted = number
        self._due = time.monotonic() + _AGAIN_SECONDS
        while self._sent and self._sent[0][0] <= number:
            self._sent.popleft()
        while self._held and self._held[0][0] <= number:
            self._held.popleft()[1]()

    def _post(self, frames: list[Any]) -> None:
        assert self._line is not None
        self._line.send(frames)
