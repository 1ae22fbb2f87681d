"""What the processes of one pipeline tell each other in a step, beside activations and gradients of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.bridge import Bridge
from tfdist.engine.counts import Counts
from tfdist.engine.edges import Edges
from tfdist.engine.exchange import Exchange
from tfdist.engine.group import Group
from tfdist.private.keras import tree
from tfdist.strategies.stopping import Stopping

OTHER_DATA = "the processes of a pipeline have read different data"
"""The beginning of an error."""
_SAMPLED = 4096
"""Elements of a tensor that are compared at most."""


class Processes:
    """The processes of one pipeline, in graphs and eagerly. All of them make the same calls.

    Args:
        group: of the processes; the rank of each is the number of its worker.
        name: of the model, which tells its tensors from those of others.
        stopping: whether a process wishes to end the steps of an epoch; by default nobody does.
    """

    def __init__(self, group: Group, name: str, stopping: Stopping | None = None) -> None:
        self.size = group.size
        self.worker = group.rank
        self._group = group
        self._name = name
        self._exchange = Exchange(group)
        stopping = stopping or Stopping()
        self._counts = Counts(group, "what each has read", stopping.own, stopping.learn)
        self._edges = Edges(group)
        self._bridges: dict[tuple[int, ...], Bridge] = {}

    def agreed(self, data: Any) -> Any:
        """The data of a batch, once all processes are known to have read the same.

        Args:
            data: of the batch, in any structure.

        Raises:
            InvalidArgumentError: they have not; also as the error of a graph.
            OutOfRangeError: a process wishes to end the steps of the epoch.
        """
        rows = self._counts.gather(tf.stack(_digest(data)))
        same = tf.reduce_all(tf.equal(rows, rows[:1]))
        message = (
            f"{OTHER_DATA}: their batches differ in size or contents. Each process reads the data itself, so that it "
            "has to read the same in the same order: give dataset.shuffle a seed, and random augmentation, too. Sizes "
            "and digests by worker:"
        )
        checked = tf.debugging.Assert(same, [message, rows], summarize=-1)  # None, if it has run already
        with tf.control_dependencies([] if checked is None else [checked]):
            return tree.map_structure(lambda one: tf.identity(one) if tf.is_tensor(one) else one, data)

    def total(self, losses: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum of losses over all processes.

        Args:
            losses: of this process, scalars; may be none.

        Returns:
            A float32 scalar.
        """
        own = tf.add_n([tf.cast(one, tf.float32) for one in losses]) if losses else tf.zeros([])
        return tf.reduce_sum(self._exchange.all_gather(tf.reshape(own, [1])))

    def give(self, variables: Sequence[Any], worker: int) -> None:
        """Assigns one worker's values to variables of all processes.

        Args:
            variables: of numbers, of Keras.
            worker: whose values.
        """
        if not variables:
            return
        own = tf.concat([tf.reshape(tf.cast(one.value, tf.float64), [-1]) for one in variables], 0)
        found = self._exchange.broadcast(own, worker)
        if self.worker == worker:
            return
        parts = tf.split(found, [one.shape.num_elements() for one in map(_static, variables)])
        for variable, part in zip(variables, parts, strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))

    def share(self, tensors: Sequence[tf.Tensor] | None, specs: Sequence[tf.TensorSpec], worker: int) -> list[Any]:
        """Gives tensors of one worker to all.

        Args:
            tensors: on that worker; None on others.
            specs: of the tensors.
            worker: that has them.
        """
        if tensors is not None:
            for place, tensor in enumerate(tensors):
                for other in range(self.size):
                    if other != worker:
                        self._edges.send(tensor, other, f"{self._name}: output {place}")
            return list(tensors)
        return [self._edges.receive(spec, worker, f"{self._name}: output {place}") for place, spec in enumerate(specs)]

    def summed(self, gradients: Sequence[tf.Tensor], workers: Sequence[int], names: Sequence[str]) -> list[tf.Tensor]:
        """Sums over some of the workers, this one among them.

        Args:
            gradients: dense.
            workers: in rising order.
            names: of the gradients.
        """
        return list(self._bridge(tuple(workers)).all_reduce(list(gradients), names=list(names)))

    def _bridge(self, workers: tuple[int, ...]) -> Bridge:
        if workers not in self._bridges:
            self._bridges[workers] = Bridge(self._group.subgroup(workers))
        return self._bridges[workers]


def _static(variable: Any) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)


def _digest(data: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """The number of elements of data, and a sum of some of their bits, weighted by their places; int64 scalars."""
    size = digest = tf.zeros([], tf.int64)
    for tensor in tree.flatten(data):
        if isinstance(tensor, tf.SparseTensor):
            tensor = tensor.values
        if isinstance(tensor, tf.RaggedTensor):
            tensor = tensor.flat_values
        if tensor is None or not tf.is_tensor(tensor):
            continue
        flat = tf.reshape(tensor, [-1])
        count = tf.size(flat, out_type=tf.int64)
        some = flat[:: tf.maximum(count // _SAMPLED, 1)]
        places = 2 * tf.range(tf.size(some, out_type=tf.int64)) + 1
        size += count
        digest = 31 * digest + tf.reduce_sum(_as_integers(some) * places)
    return size, digest


def _as_integers(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(tensor, 2**31)
    if tensor.dtype.is_floating:
        return tf.cast(tf.bitcast(tf.cast(tensor, tf.float32), tf.int32), tf.int64)
    if tensor.dtype.is_complex:
        return _as_integers(tf.math.real(tensor))
    return tf.cast(tensor, tf.int64)
