"""Communication among the processes of one pipeline in a step, besides activations and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.counts import CountReducer
from tfdist.engine.edges import Edges
from tfdist.engine.exchange import Exchange
from tfdist.engine.group import ProcessGroup
from tfdist.engine.sums import Sums
from tfdist.pipeline.gradients import Gradient
from tfdist.private.keras import tree
from tfdist.strategies.stopping import Stopping
from tfdist.tensors import HOST

OTHER_DATA = "the processes of a pipeline have read different data"
"""Beginning of the message of an error for different data."""
_SAMPLED = 4096
"""Least number of elements of a large tensor that are compared; fewer than twice as many are."""


class PipelineCollectives:
    """The processes of one pipeline, which communicate in graphs and eagerly. All of them make the same calls.

    Args:
        group: the pipeline's processes; the rank of each is its worker's number.
        name: name of the model, which distinguishes its tensors from those of other models.
        stopping: the processes' wishes to end the steps of an epoch; by default there are none.
    """

    def __init__(self, group: ProcessGroup, name: str, stopping: Stopping | None = None) -> None:
        self.size = group.size
        self.worker = group.rank
        self._group = group
        self._name = name
        self._exchange = Exchange(group)
        stopping = stopping or Stopping()
        self._counts = CountReducer(group, "the data that each worker has read", stopping.own, stopping.learn)
        self._edges = Edges(group)
        self._sums: dict[tuple[int, ...], Sums] = {}
        self._are_sparse: dict[tuple[tuple[int, ...], tuple[str, ...]], list[bool]] = {}

    def agreed(self, data: Any) -> Any:
        """Returns the data of a batch after a check that all processes have read the same.

        Args:
            data: data of a batch, in any structure.

        Raises:
            InvalidArgumentError: the processes have read different data; in a graph, running the graph raises it.
            OutOfRangeError: a process wishes to end the steps of the epoch.
        """
        rows = self._counts.gather(tf.stack(_digest(data)))
        same = tf.reduce_all(tf.equal(rows, rows[:1]))
        message = (
            f"{OTHER_DATA}: their batches differ in size or contents. Each process must read the same data in the "
            "same order: give dataset.shuffle and random augmentation a seed. Number of elements and digest of the "
            "batch, by worker:"
        )
        with tf.device(HOST):  # GPUs have no strings
            checked = tf.debugging.Assert(same, [message, rows], summarize=-1)  # None, if it has run already
        with tf.control_dependencies([] if checked is None else [checked]):
            return tree.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, data)

    def total(self, losses: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the sum of losses over all processes.

        Args:
            losses: losses of this process, scalars; may be empty.

        Returns:
            A float64 scalar.
        """
        terms = self._exchange.all_gather(tf.reshape(sum_of(losses), [1]))
        return tf.reduce_sum(terms)

    def give(self, variables: Sequence[Any], worker: int) -> None:
        """Assigns one worker's values to variables on all processes.

        Args:
            variables: numeric Keras variables.
            worker: number of the worker whose values are assigned.
        """
        if not variables:
            return
        local_values = tf.concat([tf.reshape(tf.cast(source.value, tf.float64), [-1]) for source in variables], 0)
        received = self._exchange.broadcast(local_values, worker)
        if self.worker == worker:
            return
        parts = tf.split(received, [source.shape.num_elements() for source in map(_static, variables)])
        for variable, part in zip(variables, parts, strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))

    def share(self, tensors: Sequence[tf.Tensor] | None, specs: Sequence[tf.TensorSpec], worker: int) -> list[Any]:
        """Sends one worker's tensors to all processes, and returns them.

        Args:
            tensors: the tensors on that worker; None on others.
            specs: specs of the tensors.
            worker: number of the worker that has the tensors.
        """
        if tensors is not None:
            for place, tensor in enumerate(tensors):
                for other in range(self.size):
                    if other != worker:
                        self._edges.send(tensor, other, f"{self._name}: output {place}")
            return list(tensors)
        return [self._edges.receive(spec, worker, f"{self._name}: output {place}") for place, spec in enumerate(specs)]

    def summed(
        self, gradients: Sequence[Gradient | None], workers: Sequence[int], specs: Sequence[tf.TensorSpec]
    ) -> list[Gradient]:
        """Sums gradients over some of the workers, including this one.

        The sum is sparse, with the rows of all, if no worker's gradient is dense, as it is where one process has all
        stages. The workers agree on that when they first sum these gradients.

        Args:
            gradients: gradients of variables that these workers share; None if a worker has none.
            workers: numbers of the workers, in rising order.
            specs: shape, dtype and name of each variable.
        """
        key = tuple(workers), tuple(str(spec.name) for spec in specs)
        sums = self._sums.setdefault(key[0], Sums(self._group.subgroup(key[0])))
        if key not in self._are_sparse:
            own = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
            dense = [gradient is not None and not one for gradient, one in zip(gradients, own, strict=True)]
            with tf.init_scope():
                kinds = Exchange(self._group.subgroup(key[0])).all_gather(tf.constant([[own, dense]])).numpy()
            is_sparse, is_dense = kinds.any(axis=0)
            self._are_sparse[key] = (is_sparse & ~is_dense).tolist()
        given = [
            (_sparse if is_sparse else _dense)(gradient, spec)
            for gradient, spec, is_sparse in zip(gradients, specs, self._are_sparse[key], strict=True)
        ]
        return sums.all_reduce(given, key[1])


def sum_of(losses: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of scalars of any dtypes, as float64; zero if there are none."""
    return tf.add_n([tf.cast(loss, tf.float64) for loss in losses]) if losses else tf.zeros([], tf.float64)


def _dense(gradient: Gradient | None, spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros(spec.shape, spec.dtype) if gradient is None else tf.convert_to_tensor(gradient)


def _sparse(gradient: Gradient | None, spec: tf.TensorSpec) -> tf.IndexedSlices:
    """Returns a gradient as rows, with indices of a dtype that all workers have."""
    if gradient is None:
        rows, indices = tf.zeros([0, *spec.shape[1:]], spec.dtype), tf.zeros([0], tf.int64)
    elif isinstance(gradient, tf.IndexedSlices):
        rows, indices = gradient.values, tf.cast(gradient.indices, tf.int64)
    else:  # in a later graph than that in which the workers agreed
        rows, indices = gradient, tf.range(spec.shape[0], dtype=tf.int64)
    return tf.IndexedSlices(rows, indices, tf.constant(spec.shape.as_list(), tf.int64))


def _static(variable: Any) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)


def _digest(data: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the number of elements of data, and a sum of some of their bits weighted by position; int64 scalars."""
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
