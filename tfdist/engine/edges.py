"""Sends and receives of tensors along named edges between two processes; in graphs and eagerly.

The two ends of an edge are different programs, so they are matched by the edge's name, not by their place in the
graph. Their calls are matched by order: the n-th received tensor is the n-th sent tensor.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.collectives import point_to_point
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import host_call
from tfdist.engine.pending import Pending
from tfdist.errors import MismatchError


class Outgoing(NamedTuple):
    """A tensor to be sent.

    Attributes:
        tensor: dense numeric tensor.
        destination: rank in the group that receives the tensor.
        edge: name of the edge; a different name for each dtype and number of dimensions.
    """

    tensor: tf.Tensor
    destination: int
    edge: str


class Incoming(NamedTuple):
    """A tensor to be received.

    Attributes:
        spec: dtype and shape of the tensor. Sizes that the sender decides are None; the number of dimensions must be
            known.
        source: rank in the group that sends the tensor.
        edge: name of the edge; see `Outgoing`.
    """

    spec: tf.TensorSpec
    source: int
    edge: str


class Edges:
    """Sends and receives tensors along edges.

    Args:
        group: the processes that edges connect.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._expected: collections.defaultdict[tuple[int, str], collections.deque[Pending]]
        self._expected = collections.defaultdict(collections.deque)

    def send(self, tensor: tf.Tensor, destination: int, edge: str) -> None:
        """Starts to send a tensor, and returns without waiting for the receiver.

        Args:
            tensor: dense numeric tensor.
            destination: rank in the group that receives the tensor.
            edge: name of the edge; see `Outgoing`.

        Raises:
            ValueError: ``destination`` is not a rank of the group, or is this process.
        """
        self.exchange(sent=[Outgoing(tensor, destination, edge)])

    def receive(self, spec: tf.TensorSpec, source: int, edge: str) -> tf.Tensor:
        """Waits for a tensor.

        Args:
            spec: dtype and shape of the tensor; see `Incoming`.
            source: rank in the group that sends the tensor.
            edge: name of the edge; see `Outgoing`.

        Returns:
            The tensor, with the static shape of ``spec``.

        Raises:
            ValueError: ``source`` is not a rank of the group, or is this process; or ``spec`` has an unknown number of
                dimensions.
            MismatchError: the received tensor has another shape.
        """
        return self.exchange(received=[Incoming(spec, source, edge)])[0]

    @tf.autograph.experimental.do_not_convert
    def exchange(
        self,
        sent: Sequence[Outgoing] = (),
        expected: Sequence[Incoming] = (),
        received: Sequence[Incoming] = (),
    ) -> list[tf.Tensor]:
        """Starts to send and to receive, then waits for tensors; in a graph, all of it in one host call.

        Args:
            sent: tensors to send, without waiting for their receivers.
            expected: tensors that may arrive while this process computes; a later ``received`` waits for them.
            received: tensors to wait for.

        Returns:
            The tensors in ``received``, with the static shapes of their specs.

        Raises:
            ValueError: an edge is invalid; see `send` and `receive`.
            MismatchError: a received tensor has another shape than its spec.
        """
        tensors = [tf.convert_to_tensor(transfer.tensor) for transfer in sent]
        senders = [self._sender(transfer.destination, transfer.edge) for transfer in sent]
        beginners = [self._beginner(transfer) for transfer in expected]
        receivers = [self._receiver(transfer) for transfer in received]

        def on_host(*values: np.ndarray) -> list[np.ndarray]:
            for post, value in zip(senders, values, strict=True):
                post(value)
            for begin in beginners:
                begin()
            return [wait() for wait in receivers]

        if not (sent or expected or received):
            return []
        results = host_call(on_host, tensors, [transfer.spec for transfer in received], name="tfdist_edges")
        return list(results) if received else []

    def _sender(self, destination: int, edge: str) -> Callable[[np.ndarray], None]:
        """Returns a function that begins to send."""
        pair = self._pair(self._group.rank, destination)
        key = self._key(edge)

        def post(value: np.ndarray) -> None:
            pair.post(key, point_to_point.send(value), _kind(value.dtype, value.ndim))

        return post

    def _beginner(self, incoming: Incoming) -> Callable[[], None]:
        """Returns a function that begins to receive, for a later wait."""
        begin = self._beginning(incoming)
        queue = self._expected[incoming.source, incoming.edge]
        return lambda: queue.append(begin(True))

    def _receiver(self, incoming: Incoming) -> Callable[[], np.ndarray]:
        """Returns a function that waits for an array, and begins to receive it if that has not begun yet."""
        spec, source, edge = incoming
        begin = self._beginning(incoming)
        pair = self._pair(source, self._group.rank)
        queue = self._expected[source, edge]

        def wait() -> np.ndarray:
            array: np.ndarray = pair.wait(queue.popleft() if queue else begin(False))
            if not spec.shape.is_compatible_with(array.shape):
                raise MismatchError(
                    f"rank {self._of_job(self._group.rank)} expected {spec.dtype.name} {spec.shape} along "
                    f"{self._key(edge)} from rank {self._of_job(source)}; got shape {array.shape}. Pass the "
                    "same shape to send and receive."
                )
            return array

        return wait

    def _beginning(self, incoming: Incoming) -> Callable[[bool], Pending]:
        """Returns a function that begins to receive; its argument is whether the transfer overlaps with computation."""
        spec, source, edge = incoming
        if spec.shape.rank is None:
            raise ValueError(f"receive must know how many dimensions the tensor has; got {spec}")
        pair = self._pair(source, self._group.rank)
        dtype = np.dtype(spec.dtype.as_numpy_dtype)
        plan = point_to_point.receive(spec.shape.rank, dtype, pair.take)
        key, kind = self._key(edge), _kind(dtype, spec.shape.rank)
        near = len(set(pair.hosts)) == 1  # a transfer from another machine needs this process to drive it
        return lambda overlaps: pair.post(key, plan, kind, overlaps=overlaps, patient=near)

    def _pair(self, source: int, destination: int) -> ProcessGroup:
        for rank in (source, destination):
            if not 0 <= rank < self._group.size:
                raise ValueError(f"an edge runs between ranks from 0 to {self._group.size - 1}; got {rank}")
        if source == destination:
            raise ValueError(f"an edge runs between two different ranks; got {self._of_job(source)} for both")
        return self._group.subgroup((source, destination))

    def _of_job(self, rank: int) -> int:
        """Returns a member's rank in the job."""
        return self._group.members[rank]

    def _key(self, edge: str) -> str:
        return f"the edge {edge!r}" if self._group.is_world else f"the edge {edge!r} of {self._group}"


def _kind(dtype: np.dtype, dimensions: int) -> str:
    return f"{dtype} of {dimensions} dimension(s)"
