"""A worker's connection to one server: requests that are sent again until they are answered."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from tfdist.cluster import hosts
from tfdist.errors import PeerLostError, TfdistError
from tfdist.parameter_server.protocol import shared_memory
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.line import Line
from tfdist.parameter_server.protocol.messages import FROM_SERVER, FROM_WORKER, Push, Refused, Share, Waiting
from tfdist.parameter_server.protocol.shared_memory import Segment, located
from tfdist.parameter_server.protocol.wire import InvalidMessageError, Message

log = logging.getLogger("tfdist")

_LOOK_SECONDS = 1.0
"""Between two looks at whether the job has failed."""
_AGAIN_SECONDS = 2.0
"""Without an answer, a request is sent again; the server counts it once."""
_SLOWEST_LINE = 10e6
"""Bytes a second: a message may take that long to arrive before its server counts as lost."""
_NEWS_SECONDS = 5.0
"""Until this task has heard of the end of another one, which a server has."""
_PATIENCE_SECONDS = 30.0
"""After which a person is told whom a worker waits for."""


class RefusedError(TfdistError):
    """A server does not take a message.

    Attributes:
        refused: the server's answer.
    """

    def __init__(self, message: str, refused: Refused) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass
class Request:
    """A message under way.

    Attributes:
        message: as it was sent.
        frames: of it; they stay as they are until it is answered.
        due: when it is sent again, on the monotonic clock.
        seconds: until then; more each time, as copies of a large message keep a slow line busy.
    """

    message: Any
    frames: list[Any]
    due: float
    seconds: float


class Connection:
    """A connection, for one thread at a time. Requests to several servers may be under way at the same time.

    Args:
        address: ``host:port`` of the server.
        name: the server's name in messages.
        timeout: seconds without a sign of life after which the server counts as lost.
        keys: of the job; None for no encryption.
        failure: yields the error that has ended the job, if there is one: then nobody needs to wait any more.
        name_of: yields the name of the task with a number, for messages.
        moved: yields the address at which the server is now, if that is known; asked when it does not answer.

    Attributes:
        answer_bytes: of the largest answer that may come.
    """

    def __init__(
        self,
        address: str,
        name: str,
        timeout: float,
        keys: Keys | None = None,
        failure: Callable[[], BaseException | None] = lambda: None,
        name_of: Callable[[int], str] = "task {}".format,
        moved: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.answer_bytes = 0
        self._name_of = name_of
        self._moved = moved
        self._keys = keys
        self._failure = failure
        self._name = name
        self._timeout = timeout
        self._address = address
        self._context = zmq.Context(1)
        self._numbers = itertools.count()
        self._segment: Segment | None = None
        self._line = self._connect()
        self._open = [self._line]
        # Python's own order, in which the context ends before its socket, would never end.
        weakref.finalize(self, _close, self._context, self._open).atexit = False

    def _connect(self) -> Line:
        return Line.to(self._context, self._address, self._keys)

    def send(self, make: Callable[[int], Message], arrays: Sequence[np.ndarray] = ()) -> Request:
        """Sends a message.

        Args:
            make: the message with the given ``id``.
            arrays: that follow; they must not change until the answer is there.
        """
        message = make(next(self._numbers))
        frames = FROM_WORKER.encode(message, arrays)
        if self._segment is not None and isinstance(message, Push):  # counted once, also if a copy comes late
            slot = message.sequence % self._segment.slots
            frames = self._segment.moved(slot, frames, is_answer=False, number=message.id)
        request = Request(message, frames, 0.0, _AGAIN_SECONDS)
        self._post(request)
        return request

    def receive(self, request: Request, timeout: float | None = None) -> tuple[Any, list[np.ndarray]]:
        """Waits for the answer to a message.

        The deadline is for a sign of life: a `Push` may wait for other workers as long as the server says so.

        Args:
            request: as `send` returned it.
            timeout: seconds; those of the connection by default.

        Returns:
            The answer, and the arrays that came with it: read-only views.

        Raises:
            RefusedError: the server does not take it.
            PeerLostError: there was no sign of life in time.
            BaseException: that which has ended the job.
        """
        timeout = timeout or self._timeout
        limit = timeout + (sum(len(frame) for frame in request.frames) + self.answer_bytes) / _SLOWEST_LINE
        end = time.monotonic() + limit
        told = time.monotonic() + _PATIENCE_SECONDS
        while (now := time.monotonic()) < end:
            if now >= request.due:
                if self._go_after():
                    end = now + limit
                self._post(request)
            answer, values = self._answer(request.message.id, min(request.due, end, now + _LOOK_SECONDS) - now)
            if (failure := self._failure()) is not None:
                raise failure
            if isinstance(answer, Waiting):
                end = time.monotonic() + limit
                if now > told:
                    told = float("inf")
                    names = ", ".join(map(self._name_of, answer.awaited))
                    log.warning("tfdist: %s has waited for %d s for %s.", self._name, _PATIENCE_SECONDS, names)
            elif isinstance(answer, Refused):
                what = type(request.message).__name__
                if answer.ended is not None:
                    self._await_news()
                raise RefusedError(f"{self._name} refuses {what}: {answer.why}", answer)
            elif answer is not None:
                return answer, values
        raise PeerLostError(
            f"{self._name} at {self._address} has not answered for {timeout:g} s: its process has ended, the link to "
            "it is cut, or it has another secret (TFDIST_SECRET)."
        )

    def _await_news(self) -> None:
        """Raises what the rendezvous says about a worker that has ended; the server has heard of it before."""
        end = time.monotonic() + _NEWS_SECONDS
        while time.monotonic() < end:
            if (failure := self._failure()) is not None:
                raise failure
            time.sleep(_LOOK_SECONDS / 10)

    def request(
        self,
        make: Callable[[int], Message],
        arrays: Sequence[np.ndarray] = (),
        timeout: float | None = None,
    ) -> tuple[Any, list[np.ndarray]]:
        """Sends a message and waits for its answer; see `send` and `receive`."""
        return self.receive(self.send(make, arrays), timeout)

    def share(self, worker: int, area: int, slots: int) -> bool:
        """Has the arrays of pushes and of their answers in shared memory from now on, if the server is on this machine.

        With one slot, the arrays of an answer stay as they are until the next push.

        Args:
            worker: this task's number.
            area: bytes of the arrays of a push, or of an answer.
            slots: how many pushes may be under way.

        Returns:
            Whether it has.
        """
        self._segment = None
        if area < shared_memory.LEAST_BYTES or not hosts.is_here(self._address):
            return False
        made = Segment.make(area, slots)
        if made is None:
            return False
        segment, where = made
        try:
            self.request(lambda id: Share(id, worker, where, area, slots))
            self._segment = segment
        except RefusedError:  # it is in a container, or another user's
            pass
        finally:
            where.close()
        return self._segment is not None

    def _go_after(self) -> bool:
        """Connects to where the server is now, if it has moved; whether it has."""
        address = self._moved()
        if not address or address == self._address:
            return False
        self._address = address
        self._segment = None  # the server that takes over has not mapped it
        self._line.close()
        self._open[0] = self._line = self._connect()
        return True

    def _post(self, request: Request) -> None:
        """Sends a request, again if it is due."""
        self._line.send(request.frames)
        request.due = time.monotonic() + request.seconds
        request.seconds = min(2 * request.seconds, self._timeout / 4)  # the answer is a sign of life

    def _answer(self, number: int, seconds: float) -> tuple[Any, list[np.ndarray]]:
        """The answer to a request if it comes in time, else None. Answers to others are late copies."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._line.poll(max(left, 1e-3)):
                break
            try:
                frames = self._line.receive()
                locator = located(frames)
                if locator is not None and self._segment is not None:
                    frames = self._segment.restored(locator, frames[1], is_answer=True)
                answer, arrays = FROM_SERVER.decode(frames)
            except InvalidMessageError as error:
                raise TfdistError(f"{self._name} at {self._address} sent an invalid message: {error}") from None
            if answer.id == number:
                is_lasting = locator is None or self._segment is None or self._segment.slots == 1
                return answer, arrays if is_lasting else [array.copy() for array in arrays]
        return None, []

    def close(self) -> None:
        """Closes the connection."""
        _close(self._context, self._open)


def _close(context: zmq.Context[zmq.Socket[bytes]], lines: list[Line]) -> None:
    for line in lines:
        line.close()
    context.term()
