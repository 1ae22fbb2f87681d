"""A host's server's connection to the roots, on a thread of its own, so that the server can go on serving workers."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tfdist.errors import TfdistError
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.session import Session

log = logging.getLogger("tfdist")

_CLOSE_SECONDS = 5.0
"""Seconds to wait for the thread to end, which may be waiting for a root."""

Ended = Callable[[], BaseException | None]
"""Returns the error for which an answer is not awaited any more; None while it is awaited."""

Connect = Callable[[contextlib.ExitStack, Ended], Sequence[Connection]]
"""Connects to the roots; the stack closes the connections."""

Post = Callable[[Callable[[], None]], None]
"""Has the server's thread call a given function."""


class Uplink:
    """A thread that does one model's requests to the roots, one after the other.

    Args:
        connect: function that connects to the roots.
        make: function that makes the session over the connections.
        post: function that has the server's thread call a function.
        failed: function that gets the error that has ended the thread; called on the server's thread.
    """

    def __init__(
        self,
        connect: Connect,
        make: Callable[[Sequence[Connection]], Session],
        post: Post,
        failed: Callable[[Exception], None],
    ) -> None:
        self._connect = connect
        self._make = make
        self._post = post
        self._failed = failed
        self._end: TfdistError | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[Session], Any], Callable[[Any], None]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tfdist-roots", daemon=True)
        self._thread.start()

    def ask(self, work: Callable[[Session], Any], then: Callable[[Any], None] = lambda result: None) -> None:
        """Queues a job, which is done after all earlier jobs.

        Args:
            work: function that does the job; called on this object's thread.
            then: function that gets the result; called on the server's thread.
        """
        self._jobs.put((work, then))

    def close(self) -> None:
        """Ends the thread when it has done all jobs, or after some seconds."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_SECONDS)
        self.abandon()
        self._thread.join(_CLOSE_SECONDS)

    def abandon(self) -> None:
        """Ends the thread without the remaining jobs. Results are dropped."""
        self._end = TfdistError("this server of a host ends")
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                session = self._make(self._connect(stack, lambda: self._end))
                while (job := self._jobs.get()) is not None and self._end is None:
                    work, then = job
                    self._post(partial(self._done, then, work(session)))
        except Exception as error:
            if self._end is None:
                self._post(partial(self._failed, error))

    def _done(self, then: Callable[[Any], None], result: Any) -> None:
        if self._end is None:
            then(result)
