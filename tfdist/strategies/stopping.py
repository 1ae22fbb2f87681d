"""Early stopping of an epoch's steps on all processes, when one of them requests it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist.local_sgd.course import StopRequests


class Stopping:
    """This process's request to end the steps of `fit`, and the requests that it has learned of from others.

    The request is counted with the samples of the next step, which no process takes then: `fit` ends after the step in
    which ``stop_training`` was set, as in one process. Where processes take steps on their own, the request travels
    with their next exchange, after which no process takes another step.

    Attributes:
        is_requested: whether this process requests to end the steps of the `fit` that is under way.
        is_agreed: whether an exchange has brought a request of any process.
        is_passed_on: whether this process has learned of a request from some processes, and tells the others of it in
            the same step.
        compares_begins: whether processes compare requests before the first step of each epoch, as a callback may have
            made one there, and steps do not count them.
        ended_by_request: whether the last step of a `fit` was not taken because of a request, until `fit` has ended its
            epoch.
        is_in_step: whether a step of Keras's `fit` or `evaluate` is under way.
        kept: 1 in a step of `fit` of a process that requests its end, else 0; a float64 variable, for graphs.
    """

    def __init__(self) -> None:
        self.is_requested = self.is_agreed = self.is_passed_on = self.ended_by_request = False
        self.compares_begins = False
        self.is_in_step = self._counts = False
        with tf.init_scope(), tf.device("/cpu:0"):
            self.kept = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="tfdist_request")

    def begin(self) -> None:
        """Begins a `fit`, or another epoch of it, without requests."""
        self.is_requested = self.is_agreed = False
        self.kept.assign(0)

    def check(self) -> None:
        """Ends the steps before the next one, if an exchange has brought a request.

        Raises:
            StopIteration: an exchange has brought a request.
        """
        if self.is_agreed:
            self.ended_by_request = True
            raise StopIteration

    @contextlib.contextmanager
    def step(self, trains: bool) -> Iterator[None]:
        """Context of a step of Keras.

        Args:
            trains: whether it is a step of `fit`. The request does not end other loops over data, such as `evaluate`.
        """
        before, self.is_in_step = self.is_in_step, True
        if trains:
            self.ended_by_request, self.is_passed_on, self._counts = False, False, True
        is_counted = trains and self.is_requested
        try:
            if is_counted:
                self.kept.assign(1)
            yield
        finally:
            self.is_in_step = before
            if trains:
                self._counts = False
            if is_counted:
                self.kept.assign(0)

    def own(self) -> int:
        """Returns this process's term of the count of requests in a step: 0 or 1."""
        return int((self.is_requested or self.is_passed_on) and self._counts)

    def pass_on(self, wishes: int) -> None:
        """Notes requests that only some processes have counted, so that this process tells the others.

        Args:
            wishes: number of processes that request to end the steps.
        """
        self.is_passed_on = wishes > 0

    def learn(self, wishes: int) -> None:
        """Ends the steps if a process requests it.

        Args:
            wishes: number of processes that request to end the steps.

        Raises:
            StopIteration: at least one process requests it.
        """
        if wishes:
            self.ended_by_request = True
            raise StopIteration


class StopRequestsInRounds(StopRequests):
    """The requests that travel with the exchanges of processes that take steps on their own.

    Args:
        stopping: the strategy's `Stopping`.
    """

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping

    def own(self) -> int:
        """Returns 1 if this process requests to end the steps, else 0."""
        return int(self._stopping.is_requested)

    def learn(self, wishes: int) -> None:
        """Notes whether any process requests to end the steps; `wishes` is their number."""
        self._stopping.is_agreed = wishes > 0
