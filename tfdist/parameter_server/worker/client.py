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
from tfdist.comm.idling import Idling
from tfdist.errors import PeerLostError, TfdistError
from tfdist.parameter_server.protocol import shared_memory
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.line import Line
from tfdist.parameter_server.protocol.messages import FROM_SERVER, FROM_WORKER, OfferSegment, Push, Refused, Waiting
from tfdist.parameter_server.protocol.shared_memory import Segment, locator_of
from tfdist.parameter_server.protocol.wire import InvalidMessageError, Message

log = logging.getLogger("tfdist")

_LOOK_SECONDS = 1.0
"""Time between two checks whether the job has failed."""
_AGAIN_SECONDS = 2.0
"""Time without an answer after which a request is sent again; the server counts it once."""
_SLOWEST_LINE = 10e6
"""Bytes per second that a network has at least: the timeout is longer by the time that a message then takes."""
_NEWS_SECONDS = 5.0
"""Maximum time until this task hears that a worker has ended, when a server has heard it."""
_PATIENCE_SECONDS = 30.0
"""Time after which a warning says which workers this worker waits for."""


class MessageRefusedError(TfdistError):
    """A server refuses a message.

    Attributes:
        refused: the server's answer.
    """

    def __init__(self, message: str, refused: Refused) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass
class Request:
    """A message that is not answered yet.

    Attributes:
        message: message as it was sent.
        frames: frames of the message, which must not change until it is answered.
        due: time when it is sent again, on the monotonic clock.
        seconds: seconds to wait after the next sending; more each time, as copies of a large message keep a slow
            network busy.
    """

    message: Any
    frames: list[Any]
    due: float
    seconds: float


class Connection:
    """A connection to one server, for one thread at a time. Several connections may have requests under way.

    Args:
        address: ``host:port`` of the server.
        name: the server's name in messages.
        timeout: seconds without a sign of life after which the server counts as lost.
        keys: keys of the job; None sends without encryption.
        failure: function that returns the error that has ended the job, or None. With an error, requests stop waiting.
        name_of: function that returns the name of the task with a number, for messages.
        moved: function that returns the server's present address, or None if it is unknown; called when the server does
            not answer.

    Attributes:
        answer_bytes: bytes of the largest answer that may come.
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
        # Closes the socket before the context: in Python's own order, ending the context would block forever.
        weakref.finalize(self, _close, self._context, self._open).atexit = False

    def _connect(self) -> Line:
        return Line.to(self._context, self._address, self._keys)

    def send(self, make: Callable[[int], Message], arrays: Sequence[np.ndarray] = ()) -> Request:
        """Sends a message, and returns it as a request.

        Args:
            make: function that makes the message with an ``id``.
            arrays: arrays that follow; they must not change until the answer is there.
        """
        message = make(next(self._numbers))
        frames = FROM_WORKER.encode(message, arrays)
        if self._segment is not None and isinstance(message, Push):  # counted once, even if a late copy comes
            slot = message.sequence % self._segment.slots
            frames = self._segment.moved(slot, frames, is_answer=False, number=message.id)
        request = Request(message, frames, 0.0, _AGAIN_SECONDS)
        self._post(request)
        return request

    def receive(self, request: Request, timeout: float | None = None) -> tuple[Any, list[np.ndarray]]:
        """Waits for the answer to a message.

        The timeout is for a sign of life: a `Push` may wait for other workers as long as the server says so.

        Args:
            request: request that `send` returned.
            timeout: seconds without a sign of life; those of the connection by default.

        Returns:
            The answer, and the arrays that came with it: read-only views.

        Raises:
            MessageRefusedError: the server refuses the message.
            PeerLostError: there was no sign of life in time.
            BaseException: the error that has ended the job.
        """
        timeout = timeout or self._timeout
        limit = timeout + (sum(len(frame) for frame in request.frames) + self.answer_bytes) / _SLOWEST_LINE
        end = time.monotonic() + limit
        told = time.monotonic() + _PATIENCE_SECONDS
        while (now := time.monotonic()) < end:
            if now >= request.due:
                if self._reconnect_if_moved():
                    end = now + limit
                self._post(request)
            answer, values = self._answer(request.message.id, min(request.due, end, now + _LOOK_SECONDS) - now)
            if (failure := self._failure()) is not None:
                raise failure
            if isinstance(answer, Waiting):
                end = time.monotonic() + limit
                if now > told:
                    told = float("inf")
                    names = ", ".join(map(self._name_of, answer.awaited)) or "other workers"
                    what = f"its {type(request.message).__name__} to {self._name}"
                    log.warning(
                        "tfdist: %s has waited for %d s for an answer to %s: it depends on %s.",
                        "this task",
                        _PATIENCE_SECONDS,
                        what,
                        names,
                    )
            elif isinstance(answer, Refused):
                what = type(request.message).__name__
                if answer.ended is not None:
                    self._await_news()
                raise MessageRefusedError(f"{self._name} refuses {what}: {answer.why}", answer)
            elif answer is not None:
                return answer, values
        raise PeerLostError(
            f"{self._name} at {self._address} has not answered for {timeout:g} s: its process has ended, the link to "
            "it is cut, or it has another secret (TFDIST_SECRET). Start the job again: with Servers(snapshots=…) it "
            "goes on from its last snapshot, with Servers(copies=1) it survives a lost server. Raise "
            "TFDIST_HEARTBEAT_TIMEOUT if a server that is started again needs longer."
        )

    def _await_news(self) -> None:
        """Waits until the rendezvous, too, reports the end of a worker, and raises that error."""
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
        """Puts the arrays of pushes and their answers into shared memory from now on, if the server is on this machine.

        With one slot, the arrays of an answer stay as they are until the next push.

        Args:
            worker: number of this task.
            area: bytes of the arrays of a push, or of an answer.
            slots: number of pushes that may be under way.

        Returns:
            Whether shared memory is used.
        """
        self._segment = None
        if area < shared_memory.LEAST_BYTES or not hosts.is_here(self._address):
            return False
        made = Segment.make(area, slots)
        if made is None:
            return False
        segment, where = made
        try:
            self.request(lambda id: OfferSegment(id, worker, where, area, slots))
            self._segment = segment
        except MessageRefusedError:  # the server is in a container, or of another user
            pass
        finally:
            where.close()
        return self._segment is not None

    def _reconnect_if_moved(self) -> bool:
        """Connects to the server's new address if it has moved; returns whether it has."""
        address = self._moved()
        if not address or address == self._address:
            return False
        self._address = address
        self._segment = None  # the server that takes over has not mapped it
        self._line.close()
        self._open[0] = self._line = self._connect()
        return True

    def _post(self, request: Request) -> None:
        """Sends a request, and sets when it is due again."""
        self._line.send(request.frames)
        request.due = time.monotonic() + request.seconds
        request.seconds = min(2 * request.seconds, self._timeout / 4)  # often enough for answers as signs of life

    def _answer(self, number: int, seconds: float) -> tuple[Any, list[np.ndarray]]:
        """Returns the answer to a request if it comes in time, else None. Drops late copies of other answers."""
        end, idling = time.monotonic() + seconds, Idling()
        while (left := end - time.monotonic()) > 0:
            if not self._line.poll(0.0):
                if idling.spin():
                    continue
                if not self._line.poll(max(left, 1e-3)):
                    break
            try:
                frames = self._line.receive()
                locator = locator_of(frames)
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
