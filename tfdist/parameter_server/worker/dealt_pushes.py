"""Pushes of dealt batches: the first server, which has the dealer, decides about each, and the others follow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.parameter_server.protocol.messages import Decision, Suspend
from tfdist.parameter_server.protocol.wire import Message
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError
from tfdist.parameter_server.worker.exchange import Answers, Exchange, Make


class DealtPushes:
    """A worker's pushes whose batches were dealt.

    Args:
        connections: connection to each server; the first one's has the dealer.
        exchange: the worker's exchange with the servers.
        sender: number of the worker's task, and incarnation of its session.

    Attributes:
        refusals: number of pushes that were not applied, because their batches were dealt to other workers.
    """

    def __init__(self, connections: Sequence[Connection], exchange: Exchange, sender: tuple[int, int]) -> None:
        self._others = range(1, len(connections))
        self._connections = connections
        self._exchange = exchange
        self._sender = sender
        self._has_pushed = False
        self.refusals = 0

    def send(
        self,
        ticket: int,
        push: Callable[[int | Decision | None, int, int], Message],
        arrays: Sequence[Sequence[np.ndarray]],
        pull: Make,
    ) -> Callable[[], Answers]:
        """Sends a push to the first server, and its decision to the others when their answers are waited for.

        If the first server refuses the push, because the batch was dealt to another worker, the others do not get it.

        Args:
            ticket: ticket of the batch.
            push: function that makes the push to a server from its ``dealt``, the server's index and an ``id``.
            arrays: by server, the arrays of the push.
            pull: function that makes the message to the others in place of a refused push.

        Returns:
            Function that waits for all servers' answers.
        """
        self._has_pushed = True
        first = self._exchange.send(functools.partial(push, ticket), arrays, range(1))

        def wait() -> Answers:
            ((answer, _),) = answered = first()
            self.refusals += answer.is_refused
            rest = (
                self._exchange.send(pull, servers=self._others)
                if answer.is_refused
                else self._exchange.send(functools.partial(push, answer.decision), arrays, self._others)
            )
            return [*answered, *rest()]

        return wait

    def attached_again(self, server: int) -> None:
        """Suspends the worker on the other servers, after the first one has forgotten it.

        Its clock on the first server is different now. Without this, workers could wait for each other on different
        servers.

        Args:
            server: index of the server that the worker has attached to again.
        """
        if server or not self._has_pushed:
            return
        for connection in self._connections[1:]:
            try:
                connection.request(lambda id: Suspend(id, *self._sender))
            except MessageRefusedError as error:
                if not error.refused.is_unknown:  # else no worker waits for this one there either
                    raise
