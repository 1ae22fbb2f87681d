"""Sends and receives of tensors along named edges between two processes; in graphs and eagerly.

The two ends of an edge are different programs, so they are matched by the edge's name, not by their place in the
graph. Their calls are matched by order: the n-th tensor that is received is the n-th that was sent.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.collectives import point_to_point
from tfdist.engine.group import Group
from tfdist.engine.host_calls import host_call
from tfdist.engine.pending import Pending
from tfdist.errors import MismatchError
from tfdist.tensors import to_array, to_tensor


class Edges:
    """Sends and receives.

    Args:
        group: the processes that edges connect.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._expected: collections.defaultdict[tuple[int, str], collections.deque[Pending]]
        self._expected = collections.defaultdict(collections.deque)

    @tf.autograph.experimental.do_not_convert
    def send(self, tensor: tf.Tensor, destination: int, edge: str) -> None:
        """Starts to send a tensor, and returns without waiting for the receiver.

        Args:
            tensor: a dense numeric tensor.
            destination: the rank in the group that receives it.
            edge: the edge's name; a different one for each dtype and number of dimensions.

        Raises:
            ValueError: ``destination`` is not a rank of the group, or is this process.
        """
        tensor = tf.convert_to_tensor(tensor)
        pair = self._pair(self._group.rank, destination)

        def on_host(value: tf.Tensor) -> None:
            array = np.ascontiguousarray(to_array(value))
            pair.post(self._key(edge), point_to_point.send(array.reshape(value.shape)), _kind(value))

        if tf.executing_eagerly():
            on_host(tensor)
        else:
            host_call(on_host, [tensor], [], name="tfdist_send")

    @tf.autograph.experimental.do_not_convert
    def receive(self, spec: tf.TensorSpec, source: int, edge: str) -> tf.Tensor:
        """Waits for a tensor.

        Args:
            spec: its dtype and shape. Dimensions may be None where the sender decides; their number must be known.
            source: the rank in the group that sends it.
            edge: as in `send`.

        Returns:
            The tensor, with the static shape of ``spec``.

        Raises:
            ValueError: ``source`` is not a rank of the group, or is this process; or ``spec`` has an unknown number of
                dimensions.
            MismatchError: the received tensor has another shape.
        """
        begin = self._beginning(spec, source, edge)
        pair = self._pair(source, self._group.rank)

        def on_host() -> tf.Tensor:
            expected = self._expected[source, edge]
            array = pair.wait(expected.popleft() if expected else begin(False), tf.executing_eagerly())
            if not spec.shape.is_compatible_with(array.shape):
                raise MismatchError(
                    f"rank {self._of_job(self._group.rank)} expected {spec.dtype.name} {spec.shape} along "
                    f"{self._key(edge)} from rank {self._of_job(source)}; got shape {array.shape}. Pass the "
                    "same shape to send and receive."
                )
            return to_tensor(array)

        if tf.executing_eagerly():
            return on_host()
        tensor = host_call(on_host, [], spec.dtype, name="tfdist_receive")
        tensor.set_shape(spec.shape)
        return tensor

    @tf.autograph.experimental.do_not_convert
    def expect(self, spec: tf.TensorSpec, source: int, edge: str) -> None:
        """Lets a tensor come while this process computes; a later `receive` waits for it.

        Args:
            spec: as of `receive`.
            source: as of `receive`.
            edge: as of `receive`.

        Raises:
            ValueError: as `receive`.
        """
        begin = self._beginning(spec, source, edge)

        def on_host() -> None:
            self._expected[source, edge].append(begin(True))

        if tf.executing_eagerly():
            on_host()
        else:
            host_call(on_host, [], [], name="tfdist_expect")

    def _beginning(self, spec: tf.TensorSpec, source: int, edge: str) -> Callable[[bool], Pending]:
        """A function that begins to receive; its argument is whether nobody waits yet."""
        if spec.shape.rank is None:
            raise ValueError(f"receive must know how many dimensions the tensor has; got {spec}")
        pair = self._pair(source, self._group.rank)
        dtype = np.dtype(spec.dtype.as_numpy_dtype)

        def begin(overlaps: bool) -> Pending:
            plan = point_to_point.receive(spec.shape.rank, dtype, pair.take)
            return pair.post(self._key(edge), plan, _kind(spec), overlaps=overlaps)

        return begin

    def _pair(self, source: int, destination: int) -> Group:
        for rank in (source, destination):
            if not 0 <= rank < self._group.size:
                raise ValueError(f"an edge runs between ranks from 0 to {self._group.size - 1}; got {rank}")
        if source == destination:
            raise ValueError(f"an edge runs between two ranks; got {self._of_job(source)} for both")
        return self._group.subgroup((source, destination))

    def _of_job(self, rank: int) -> int:
        """A member's rank in the job."""
        return self._group.members[rank]

    def _key(self, edge: str) -> str:
        return f"the edge {edge!r}" if self._group.is_world else f"the edge {edge!r} of {self._group}"


def _kind(tensor: tf.Tensor | tf.TensorSpec) -> str:
    return f"{tensor.dtype.name} of {tensor.shape.rank} dimension(s)"
