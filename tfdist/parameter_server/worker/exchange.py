"""A worker's messages to all servers, which are repeated where a server was started again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.parameter_server.protocol.wire import Message
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError, Request

Make = Callable[[int, int], Message]
"""Makes the message to a server from the server's index and the message's ``id``."""

Answers = list[tuple[Any, list[np.ndarray]]]
"""By server, its answer and the arrays that came with it."""


class Exchange:
    """Sends messages to servers, and receives their answers.

    Where a server does not know the worker, because it was started again or took the worker for lost, the worker
    attaches again, and repeats all that this server has not answered.

    Args:
        connections: connection to each server, in the order of the cluster.
        attach_again: function that attaches the worker to the server with an index.
    """

    def __init__(self, connections: Sequence[Connection], attach_again: Callable[[int], None]) -> None:
        self._connections = connections
        self._attach_again = attach_again
        self._unanswered: list[list[_PendingMessage]] = [[] for _ in connections]

    def send(
        self, make: Make, arrays: Sequence[Sequence[np.ndarray]] | None = None, servers: range | None = None
    ) -> Callable[[], Answers]:
        """Sends a message to each server, or to some.

        Args:
            make: function that makes the message; called again when the message is repeated.
            arrays: by server, arrays that follow; they must not change until the answers are there.
            servers: indices of the servers; all by default.

        Returns:
            Function that waits for the answers, in the order of the servers.
        """
        given = arrays or [()] * len(self._connections)
        sent = [
            (server, _PendingMessage(self._connections[server], functools.partial(make, server), given[server]))
            for server in (range(len(self._connections)) if servers is None else servers)
        ]
        for server, message in sent:
            self._unanswered[server].append(message)
        return lambda: [self._receive(server, message) for server, message in sent]

    def _receive(self, server: int, message: _PendingMessage) -> tuple[Any, list[np.ndarray]]:
        try:
            while True:
                try:
                    return self._connections[server].receive(message.request)
                except MessageRefusedError as error:
                    if not error.refused.is_unknown:
                        raise
                self._attach_again(server)
                for other in self._unanswered[server]:  # in their order: after a later push, this one is a copy
                    other.send()
        finally:
            self._unanswered[server].remove(message)


class _PendingMessage:
    """A message under way to a server.

    Args:
        connection: connection to the server.
        make: function that makes the message with an ``id``.
        arrays: arrays that follow.

    Attributes:
        request: request as it was sent last.
    """

    def __init__(self, connection: Connection, make: Callable[[int], Message], arrays: Sequence[np.ndarray]) -> None:
        self._connection = connection
        self._make = make
        self._arrays = arrays
        self.send()

    def send(self) -> None:
        """Sends the message under a new number."""
        self.request: Request = self._connection.send(self._make, self._arrays)
