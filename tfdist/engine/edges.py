"""Tensors from one process to another, in graphs and eagerly: along edges that have names.

The two ends of an edge are different programs. So they are matched by the edge's name, not by their place in the
graph, and their calls by order: the n-th tensor that is received is the n-th that was sent.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.collectives import point_to_point
from tfdist.engine.group import Group
from tfdist.errors import MismatchError
from tfdist.tensors import to_tensor


class Edges:
    """Sends and receives.

    Args:
        group: the processes among which edges run.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @tf.autograph.experimental.do_not_convert
    def send(self, tensor: tf.Tensor, destination: int, edge: str) -> None:
        """Begins to send a tensor, and goes on; also where nobody receives yet.

        Args:
            tensor: dense, of numbers.
            destination: the rank in the group that receives it.
            edge: names the edge; of its own for each dtype and number of dimensions.

        Raises:
            ValueError: there is no such rank, or it is this process.
        """
        tensor = tf.convert_to_tensor(tensor)
        pair = self._pair(self._group.rank, destination)

        def on_host(value: tf.Tensor) -> None:
            array = np.ascontiguousarray(value)
            pair.post(_key(edge), point_to_point.send(array.reshape(value.shape)), _kind(value))

        if tf.executing_eagerly():
            on_host(tensor)
        else:
            tf.py_function(on_host, [tensor], [], name="tfdist_send")

    @tf.autograph.experimental.do_not_convert
    def receive(self, spec: tf.TensorSpec, source: int, edge: str) -> tf.Tensor:
        """Waits for a tensor.

        Args:
            spec: its dtype and shape, which may hold None where the sender decides; the number of dimensions is known.
            source: the rank in the group that sends it.
            edge: as of `send`.

        Returns:
            The tensor, of the static shape that ``spec`` gives.

        Raises:
            ValueError: there is no such rank, or it is this process; or ``spec`` does not tell the dimensions.
            MismatchError: a tensor of another shape has come.
        """
        if spec.shape.rank is None:
            raise ValueError(f"receive must know how many dimensions a tensor has; got {spec}")
        pair = self._pair(source, self._group.rank)
        dtype = np.dtype(spec.dtype.as_numpy_dtype)

        def on_host() -> tf.Tensor:
            plan = point_to_point.receive(spec.shape.rank, dtype, pair.take)
            array = pair.wait(pair.post(_key(edge), plan, _kind(spec), overlaps=False), tf.executing_eagerly())
            if not spec.shape.is_compatible_with(array.shape):
                raise MismatchError(
                    f"rank {self._group.rank} expects {spec.dtype.name} {spec.shape} along the edge {edge!r} from rank "
                    f"{source} of {self._group}; got {array.shape}"
                )
            return to_tensor(array)

        if tf.executing_eagerly():
            return on_host()
        tensor = tf.py_function(on_host, [], spec.dtype, name="tfdist_receive")
        tensor.set_shape(spec.shape)
        return tensor

    def _pair(self, source: int, destination: int) -> Group:
        for rank in (source, destination):
            if not 0 <= rank < self._group.size:
                raise ValueError(f"an edge runs between ranks from 0 to {self._group.size - 1}; got {rank}")
        if source == destination:
            raise ValueError(f"an edge runs between two ranks; got {source} for both")
        return self._group.subgroup((source, destination))


def _key(edge: str) -> str:
    return f"the edge {edge!r}"


def _kind(tensor: tf.Tensor | tf.TensorSpec) -> str:
    return f"{tensor.dtype.name} of {tensor.shape.rank} dimension(s)"
