"""A worker's connection to one server: requests that are sent again until they are answered."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from tfdist.errors import PeerLostError, TfdistError
from tfdist.parameter_server.messages import FROM_SERVER, FROM_WORKER, Refused, Waiting
from tfdist.parameter_server.server import MAX_FRAME
from tfdist.parameter_server.wire import InvalidMessageError, Message

_AGAIN_SECONDS = 2.0
"""Without an answer, a request is sent again; the server counts it once."""


class RefusedError(TfdistError):
    """A server does not take a message.

    Attributes:
        is_unknown: whether the worker has to attach first.
    """

    def __init__(self, message: str, is_unknown: bool) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown


class Connection:
    """A connection, which any thread may use; one at a time.

    Args:
        address: ``host:port`` of the server.
        name: the server's name in messages.
        timeout: seconds without an answer after which the server counts as lost.
    """

    def __init__(self, address: str, name: str, timeout: float) -> None:
        self._name = name
        self._timeout = timeout
        self._address = address
        self._context = zmq.Context(1)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.SNDHWM, 0), (zmq.RECONNECT_IVL, 50)):
            made.setsockopt(option, value)
        made.connect(f"tcp://{self._address}")
        return made

    def request(
        self,
        make: Callable[[int], Message],
        arrays: Sequence[np.ndarray] = (),
        timeout: float | None = None,
    ) -> tuple[Any, list[np.ndarray]]:
        """Sends a message and waits for its answer.

        The deadline is for a sign of life: a `Pull` may wait for other workers as long as the server says so.

        Args:
            make: the message with the given ``id``.
            arrays: that follow; they must not change until the answer is there.
            timeout: seconds; those of the connection by default.

        Returns:
            The answer, and the arrays that came with it: read-only views.

        Raises:
            RefusedError: the server does not take it.
            PeerLostError: there was no sign of life in time.
        """
        with self._lock:
            number = next(self._numbers)
            frames = FROM_WORKER.encode(make(number), arrays)
            timeout = timeout or self._timeout
            end, due = time.monotonic() + timeout, 0.0
            while (now := time.monotonic()) < end:
                if now >= due:
                    self._socket.send_multipart(frames, copy=False)
                    due = now + _AGAIN_SECONDS
                answer, values = self._answer(number, min(due, end) - now)
                if isinstance(answer, Waiting):
                    end = time.monotonic() + timeout
                elif isinstance(answer, Refused):
                    what = type(make(number)).__name__
                    raise RefusedError(f"{self._name} refuses {what}: {answer.why}", answer.is_unknown)
                elif answer is not None:
                    return answer, values
            raise PeerLostError(
                f"{self._name} at {self._address} has not answered for {timeout:g} s: its process has ended, or "
                "the link to it is cut."
            )

    def _answer(self, number: int, seconds: float) -> tuple[Any, list[np.ndarray]]:
        """The answer to a request if it comes in time, else None. Answers to others are late copies."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(1000 * left))):
                break
            try:
                answer, arrays = FROM_SERVER.decode([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
            except InvalidMessageError as error:
                raise TfdistError(f"{self._name} at {self._address} sent an invalid message: {error}") from None
            if answer.id == number:
                return answer, arrays
        return None, []

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._socket.close()
            self._context.term()
