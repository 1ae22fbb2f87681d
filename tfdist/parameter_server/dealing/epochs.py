"""The worker's side of epochs whose batches are dealt to all workers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdist.errors import TfdistError
from tfdist.parameter_server.dealing.plan import Plan, order
from tfdist.parameter_server.dealing.stream_reader import Stream, StreamReader
from tfdist.parameter_server.protocol.dealing import (
    BeginEpoch,
    DealtBatch,
    LeaveEpoch,
    MergeMetrics,
    NoBatch,
    Rule,
    SkipBatch,
    TakeBatch,
)
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError

AFTER_PAUSE = 1 << 62
"""Bit of a ticket: the worker had to wait for this batch, and has to read the newest values before it trains on it."""
_LEAVE_SECONDS = 2.0


def number_of(ticket: int) -> int:
    """Returns a ticket as the dealer knows it, without the bit `AFTER_PAUSE`.

    Args:
        ticket: ticket, with or without the bit.
    """
    return ticket & ~AFTER_PAUSE


class SharedEpochs:
    """A worker's part in the epochs of one call of `fit`. One thread reads batches while another one trains.

    Args:
        connect: function that makes a connection to the server with the dealer.
        worker: number of this task.
        fit: how many calls of `fit` with shared data this worker has begun before.
        plan: plan of each epoch; the dealer replaces its seed by that of the first worker.
        when_idle: function that tells all servers not to wait for this worker; called on the thread that reads batches.
        stream: function that yields the batches, if this worker brings them to all others; ``plan.samples`` is None
            then. None without a stream, or on the other workers.

    Attributes:
        failure: error that prevents reading more batches; None without an error.
        taken: number of batches of the current epoch that this worker was dealt.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        worker: int,
        fit: int,
        plan: Plan,
        when_idle: Callable[[], None] = lambda: None,
        stream: Stream | None = None,
    ) -> None:
        self._worker = worker
        self._fit = fit
        self._plan = plan
        self._when_idle = when_idle
        self._incarnation = secrets.randbits(63)
        self._requests = itertools.count()
        self._epoch: int | None = None
        self._begins_again = False
        self._is_closed = False
        self._telling = threading.Lock()
        self._taking = threading.Lock()
        self.failure: TfdistError | None = None
        self.taken = 0
        with contextlib.ExitStack() as stack:
            self._teller = connect()
            stack.callback(self._teller.close)
            self._taker = connect()
            stack.callback(self._taker.close)
            self._bringer = None
            if stream is not None:
                self._bringer = StreamReader(connect(), stream, worker, self._incarnation, fit, begun=self._begun)
            stack.pop_all()

    def begin(self, epoch: int) -> None:
        """Begins to take part in an epoch.

        Args:
            epoch: number of the epoch.

        Raises:
            MessageRefusedError: the other workers have other data, or shuffle them differently.
            PeerLostError: the server cannot be reached.
        """
        self._epoch, self.taken = None, 0
        with self._telling:
            self._begun(self._teller, epoch)
        self._epoch = epoch
        if self._bringer is not None:
            self._bringer.begin(epoch)

    def tickets(self) -> Iterator[tuple[int, Any]]:
        """Yields the batches of the epoch that are dealt to this worker.

        Yields:
            The ticket, perhaps with the bit `AFTER_PAUSE`, and the batch: indices of samples, or arrays of a stream.

        Raises:
            TfdistError: the server cannot be reached, or refuses.
        """
        epoch, pauses = self._epoch, False
        if epoch is None:
            return
        plan, places = self._plan, self._order(epoch)
        while True:
            try:
                with self._taking:
                    answer, parts = self._taken(epoch, pauses)
                if isinstance(answer, NoBatch) and not pauses:
                    self._when_idle()  # also at the end of the epoch: others may have to finish their last steps
                if isinstance(answer, NoBatch) and not answer.is_over:
                    pauses = True
                    continue
            except TfdistError as error:
                self.failure = error
                raise
            if isinstance(answer, NoBatch):
                return
            if self._plan != plan:  # another worker has begun an epoch again that the server had forgotten
                plan, places = self._plan, self._order(epoch)
            self.taken += 1
            batch = parts if plan.samples is None else places[answer.start : answer.stop]
            yield answer.ticket | (AFTER_PAUSE if pauses else 0), batch
            pauses = False

    def skip(self, ticket: int) -> None:
        """Tells the dealer that a batch was used up in a step that made no update.

        Args:
            ticket: ticket of the batch.
        """
        with self._telling:
            self._teller.request(lambda id: SkipBatch(id, self._worker, self._incarnation, number_of(ticket)))

    def merged(self, arrays: Sequence[np.ndarray], rules: Sequence[Rule], names: Sequence[str]) -> list[np.ndarray]:
        """Returns the state of metrics over all workers at the end of the epoch, when all workers have given theirs.

        Args:
            arrays: values of this worker's metric variables.
            rules: how to merge each of the arrays.
            names: names of the metrics.

        Raises:
            TfdistError: the server cannot be reached, or another worker has other metrics.
        """
        epoch = self._epoch
        assert epoch is not None

        def merge(id: int) -> MergeMetrics:
            return MergeMetrics(id, self._worker, self._incarnation, self._fit, epoch, tuple(rules), tuple(names))

        with self._telling:
            while True:
                try:
                    return self._teller.request(merge, arrays)[1]
                except MessageRefusedError as error:
                    if not error.refused.is_unknown:
                        raise
                self._begun(self._teller, epoch)  # the server was started again, or took this worker for lost

    def close(self) -> None:
        """Leaves the call of `fit`. Batches that are not committed are dealt to others. Iterators of `tickets` end."""
        if self._is_closed:
            return
        self._epoch, self._is_closed = None, True
        if self._bringer is not None:
            self._bringer.stop()
        with self._telling:
            self._leave()
            with self._taking:
                if self._begins_again:  # perhaps after the server had heard of the leave
                    self._leave()
                self._taker.close()
            self._teller.close()
        if self._bringer is not None:
            self._bringer.close()

    def _leave(self) -> None:
        with contextlib.suppress(TfdistError):  # the rendezvous tells the server, too, that this worker has ended
            self._teller.request(lambda id: LeaveEpoch(id, self._worker, self._incarnation), timeout=_LEAVE_SECONDS)

    def _order(self, epoch: int) -> np.ndarray:
        return order(self._plan, (self._fit, epoch))

    def _begun(self, connection: Connection, epoch: int) -> None:
        plan = self._plan

        def begin(id: int) -> BeginEpoch:
            return BeginEpoch(
                id,
                self._worker,
                self._incarnation,
                self._fit,
                epoch,
                plan.samples,
                plan.batch_size,
                plan.seed,
                plan.within_batches,
                brings=self._bringer is not None,
            )

        answer, _ = connection.request(begin)
        self._plan = dataclasses.replace(plan, seed=answer.seed)

    def _taken(self, epoch: int, is_idle: bool) -> tuple[DealtBatch | NoBatch, list[np.ndarray]]:
        """Requests a batch, and returns the answer; an end of the epoch if this worker has gone on meanwhile."""
        request = next(self._requests)

        def take(id: int) -> TakeBatch:
            return TakeBatch(id, self._worker, self._incarnation, self._fit, epoch, request, is_idle)

        while self._epoch == epoch:
            try:
                return self._taker.request(take)
            except MessageRefusedError as error:
                if not error.refused.is_unknown:
                    raise
            if self._epoch == epoch:  # the server was started again, or took this worker for lost
                self._begins_again = True
                self._begun(self._taker, epoch)
        return NoBatch(-1, is_over=True), []
