"""The session of an evaluator, which reads a model from parameter servers and does not count as a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.protocol.messages import Inspect, PullKind, ReadModel, ServerReport
from tfdist.parameter_server.protocol.packing import Packed
from tfdist.parameter_server.protocol.report import ModelReport
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.exchange import Make
from tfdist.parameter_server.worker.model import Model
from tfdist.parameter_server.worker.session import Session, Vectors

_AGAIN_SECONDS = 0.5
"""Time between two questions whether a server has the model."""


class Observer(Session):
    """A session without pushes, which waits for the newest model of a name and reads it.

    Args:
        connections: connection to each server, in the order of the cluster.
        model: variables to read.
        over: event that is set when no training task is left that could give the servers the model.
    """

    def __init__(self, connections: Sequence[Connection], model: Model, over: threading.Event) -> None:
        super().__init__(connections, worker=-1, model=model)
        self._over = over

    def begin(
        self,
        held: Sequence[HeldRows],
        optimizer: dict[str, Any],
        values: Callable[[], TrainingState] | None,
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
        """Returns the number of updates that the servers' parameters contain now, on the server with the fewest."""
        reports = [report for report, _ in self.answers(lambda server, id: Inspect(id))]
        newest = [
            max((shard.occurrence, shard.version) for shard in shards)
            for report in reports
            if (shards := self._own(report))
        ]
        return min((version for _, version in newest), default=0)

    def _own(self, report: ServerReport) -> list[ModelReport]:
        return [shard for shard in report.models if shard.model == self._model.name]

    def step(self, gradients: Sequence[PushedGradients | Packed], *arguments: Any, **options: Any) -> Vectors:
        """Raises an error, because an evaluator pushes nothing.

        Raises:
            TfdistError: always.
        """
        raise TfdistError("an evaluator does not train: it has pushed nothing to the parameter servers")

    def suspend(self, is_end: bool = False) -> None:
        """Does nothing, because nobody waits for an evaluator."""

    def leave(self, is_over: bool = False) -> None:
        """Does nothing, because no server knows an evaluator."""

    def _pulling(self, what: PullKind) -> Make:
        return lambda server, id: ReadModel(id, self._model.name, what)

    def _attach(self, server: int) -> None:
        """Waits before a server that does not have the model is asked again."""
        if self._over.wait(_AGAIN_SECONDS):
            raise TfdistError(
                f"the job is over, and the parameter servers have no model {self._model.name}: the workers have "
                "trained none, or another one than this evaluator has built"
            )
