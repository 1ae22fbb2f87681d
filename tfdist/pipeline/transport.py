"""Transport of results from the stages of one process to those of another."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.engine.edges import Edges, Incoming, Outgoing
from tfdist.pipeline.actions import Transfer


class Transport:
    """Carries tensors between workers in different processes; in graphs and eagerly.

    Args:
        edges: sends and receives in a group where the rank of a process is its worker's number.
        name: name of the model, unique among the models that the group trains.
    """

    def __init__(self, edges: Edges, name: str) -> None:
        self._edges = edges
        self._name = name

    def exchange(
        self,
        sent: Sequence[tuple[Transfer, int, Sequence[tf.Tensor]]] = (),
        expected: Sequence[tuple[Transfer, int, Sequence[tf.TensorSpec]]] = (),
        received: Sequence[tuple[Transfer, int, Sequence[tf.TensorSpec]]] = (),
    ) -> list[list[tf.Tensor]]:
        """Starts to send and to receive, then waits; see `tfdist.engine.edges.Edges.exchange`.

        Args:
            sent: transfers to send, each with the worker that receives it, and its dense tensors.
            expected: transfers that may arrive during computation, each with the worker that sends it, and its tensors'
                specs.
            received: transfers to wait for, in the same form as ``expected``.

        Returns:
            The tensors of each transfer that was received.
        """
        outgoing = [
            Outgoing(tensor, worker, self._edge(transfer, place))
            for transfer, worker, tensors in sent
            for place, tensor in enumerate(tensors)
        ]
        arrived = iter(self._edges.exchange(outgoing, self._incoming(expected), self._incoming(received)))
        return [[next(arrived) for _ in specs] for _, _, specs in received]

    def _incoming(self, transfers: Sequence[tuple[Transfer, int, Sequence[tf.TensorSpec]]]) -> list[Incoming]:
        return [
            Incoming(spec, worker, self._edge(transfer, place))
            for transfer, worker, specs in transfers
            for place, spec in enumerate(specs)
        ]

    def _edge(self, transfer: Transfer, place: int) -> str:
        return f"{self._name}: {transfer.result_of} to stage {transfer.destination}, {place}"
