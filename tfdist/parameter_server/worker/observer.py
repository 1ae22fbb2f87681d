"""An evaluator's view of a model on parameter servers: it reads, and no server counts it among the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.gradients import Gradients
from tfdist.parameter_server.protocol.messages import Inspect, Read, Report, What
from tfdist.parameter_server.protocol.packing import Packed
from tfdist.parameter_server.protocol.report import ModelReport
from tfdist.parameter_server.protocol.state import Held, State
from tfdist.parameter_server.protocol.wire import Message
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.model import Model
from tfdist.parameter_server.worker.session import Session, Vectors

_AGAIN_SECONDS = 0.5
"""Between two questions whether a server has the model by now."""


class Observer(Session):
    """A session without pushes. It reads the newest model of a name, which it waits for.

    Args:
        connections: to each server, in the order of the cluster.
        model: the variables.
        over: set when no training task is left: then nobody gives the servers the model any more.
    """

    def __init__(self, connections: Sequence[Connection], model: Model, over: threading.Event) -> None:
        super().__init__(connections, worker=-1, model=model)
        self._over = over

    def begin(
        self,
        held: Sequence[Held],
        optimizer: dict[str, Any],
        values: Callable[[], State] | None,
        follows: bool = True,
    ) -> Vectors:
        """Waits for the model.

        Returns:
            The variables' values.

        Raises:
            TfdistError: the job is over, and no server has the model.
            PeerLostError: a server cannot be reached.
        """
        return self.pull()

    def newest_version(self) -> int:
        """The number of updates that the servers' parameters contain now; of the server that has least."""
        reports = [report for report, _ in self._answers(lambda server, id: Inspect(id))]
        found = [max((one.occurrence, one.version) for one in own) for report in reports if (own := self._own(report))]
        return min((version for _, version in found), default=0)

    def _own(self, report: Report) -> list[ModelReport]:
        return [one for one in report.models if one.model == self._model.name]

    def step(self, gradients: Sequence[Gradients | Packed], *arguments: Any, **options: Any) -> Vectors:
        """An evaluator pushes nothing.

        Raises:
            TfdistError: always.
        """
        raise TfdistError("an evaluator does not train: it has pushed nothing to the parameter servers")

    def suspend(self, is_end: bool = False) -> None:
        """Nobody waits for an evaluator."""

    def leave(self, is_over: bool = False) -> None:
        """No server knows an evaluator."""

    def _pulling(self, what: What) -> Callable[[int, int], Message]:
        return lambda server, id: Read(id, self._model.name, what)

    def _attach(self, server: int) -> None:
        """The server does not have the model, or not yet."""
        if self._over.wait(_AGAIN_SECONDS):
            raise TfdistError(
                f"the job is over, and the parameter servers have no model {self._model.name}: the workers have "
                "trained none, or another one than this evaluator has built"
            )
