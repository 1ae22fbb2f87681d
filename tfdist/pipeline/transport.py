"""How results get from stage to stage: inside a process, or to another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfdist.engine.edges import Edges
from tfdist.pipeline.actions import Transfer


class Transport(Protocol):
    """Carries tensors between stages, in graphs and eagerly."""

    def send(self, transfer: Transfer, worker: int, tensors: Sequence[tf.Tensor]) -> None:
        """Starts to send tensors, and does not wait for the receiver.

        Args:
            transfer: what they are.
            worker: that receives them.
            tensors: dense.
        """

    def expect(self, transfer: Transfer, worker: int, specs: Sequence[tf.TensorSpec]) -> None:
        """Lets tensors come while this process computes.

        Args:
            transfer: what they are.
            worker: that sends them.
            specs: of the tensors.
        """

    def receive(self, transfer: Transfer, worker: int, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        """Waits for tensors.

        Args:
            transfer: as of `expect`.
            worker: as of `expect`.
            specs: as of `expect`.
        """


class WithinProcess:
    """Between stages of one process: TensorFlow copies what is on another device."""

    def __init__(self) -> None:
        self._sent: dict[Transfer, list[tf.Tensor]] = {}

    def send(self, transfer: Transfer, worker: int, tensors: Sequence[tf.Tensor]) -> None:
        """See `Transport`."""
        self._sent[transfer] = list(tensors)

    def expect(self, transfer: Transfer, worker: int, specs: Sequence[tf.TensorSpec]) -> None:
        """See `Transport`."""

    def receive(self, transfer: Transfer, worker: int, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        """See `Transport`."""
        return self._sent.pop(transfer)


class BetweenProcesses:
    """Between processes, one for each worker.

    Args:
        edges: of a group in which the rank of a process is the number of its worker.
        name: of the model; models that are trained by the same group have different ones.
    """

    def __init__(self, edges: Edges, name: str) -> None:
        self._edges = edges
        self._name = name

    def send(self, transfer: Transfer, worker: int, tensors: Sequence[tf.Tensor]) -> None:
        """See `Transport`."""
        for number, tensor in enumerate(tensors):
            self._edges.send(tensor, worker, self._edge(transfer, number))

    def expect(self, transfer: Transfer, worker: int, specs: Sequence[tf.TensorSpec]) -> None:
        """See `Transport`."""
        for number, spec in enumerate(specs):
            self._edges.expect(spec, worker, self._edge(transfer, number))

    def receive(self, transfer: Transfer, worker: int, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        """See `Transport`."""
        return [self._edges.receive(spec, worker, self._edge(transfer, number)) for number, spec in enumerate(specs)]

    def _edge(self, transfer: Transfer, number: int) -> str:
        return f"{self._name}: {transfer.result_of} to stage {transfer.destination}, {number}"
