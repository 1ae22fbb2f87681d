"""A stream of batches for all workers: one worker reads it and brings the batches to the dealer ahead of their use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.dealing import BringBatch, RoomForBatch
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError

Stream = Callable[[], Iterator[Sequence[np.ndarray]]]
"""Yields the batches of an epoch, each as a list of arrays. A second call begins again, if the data allows it."""

_END_SECONDS = 5.0
"""Seconds to wait for a batch that is being read when `fit` ends."""


class StreamReader:
    """A thread that reads a stream and brings the batches of each epoch to the dealer.

    Batches that the dealer has already, as after a restart of this process, are read and skipped.

    Args:
        connection: connection to the server with the dealer, for this object alone.
        stream: function that yields the batches of an epoch.
        worker: number of this task.
        incarnation: random number of this call of `fit`.
        fit: number of this call of `fit`.
        begun: function that begins an epoch again over a connection, when the server has forgotten it.
    """

    def __init__(
        self,
        connection: Connection,
        stream: Stream,
        worker: int,
        incarnation: int,
        fit: int,
        begun: Callable[[Connection, int], None],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._of = worker, incarnation, fit
        self._begun = begun
        self._thread: threading.Thread | None = None
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Starts to bring the batches of an epoch, and stops with those of an earlier epoch.

        Args:
            epoch: number of an epoch that this worker has begun on the server.
        """
        self._end()
        self._epoch = epoch
        self._thread = threading.Thread(target=self._run, args=(epoch,), name="tfdist-stream", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops bringing batches. Call it before the server is told that this worker leaves."""
        self._epoch = None

    def close(self) -> None:
        """Ends the thread and closes the connection. Call it after `stop`, when the server has been told."""
        self._end()
        if self._thread is None or not self._thread.is_alive():  # else the thread is still reading its last batch
            self._connection.close()

    def _end(self) -> None:
        self._epoch = None
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _run(self, epoch: int) -> None:
        with contextlib.suppress(TfdistError):  # the thread that takes batches gets the same error, and raises it
            try:
                self._bring(epoch)
            except TfdistError:
                raise
            except Exception as error:  # the user's data may raise any error
                what = f"the data of the chief's fit could not be read: {type(error).__name__}: {error}"
                self._say(epoch, 0, (), is_end=True, failure=what[:2000])

    def _bring(self, epoch: int) -> None:
        batches, read, wanted = self._stream(), 0, 0
        while self._epoch == epoch:
            if wanted < read:  # the server was started again
                batches, read = self._stream(), 0
            batch = next(batches, None)
            if batch is not None and read < wanted:
                read += 1
                continue
            answer = self._say(epoch, read, batch or (), is_end=batch is None)
            if answer is None:
                return
            read, wanted = read + (batch is not None), answer

    def _say(
        self, epoch: int, number: int, arrays: Sequence[np.ndarray], is_end: bool, failure: str | None = None
    ) -> int | None:
        """Sends a batch or the end to the server. Returns the number of the batch that it wants next; None for none."""
        while self._epoch == epoch:
            try:
                answer: RoomForBatch = self._connection.request(
                    lambda id: BringBatch(id, *self._of, epoch, number, is_end, failure), arrays
                )[0]
                return answer.wanted
            except MessageRefusedError as error:
                if not error.refused.is_unknown or self._epoch != epoch:
                    raise
            self._begun(self._connection, epoch)
        return None
