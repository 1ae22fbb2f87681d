"""Reductions over all replicas: inside the process by TensorFlow, between processes by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.compressor import Compressed, Compressor
from tfdist.engine.bridge import Bridge
from tfdist.engine.exchange import Exchange
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.shares import Shares


class ProcessCrossDeviceOps(private.CrossDeviceOps):
    """A `tf.distribute.CrossDeviceOps` that spans processes.

    Args:
        bridge: reduces between processes.
        exchange: gathers between them.
        processes: how many there are.
        local: TensorFlow's operations among this process's devices.
        shares: tells which replicas have samples in the current step.
        compressor: knows the variables whose gradients are compressed; None where none are.
    """

    def __init__(
        self,
        bridge: Bridge,
        exchange: Exchange,
        processes: int,
        local: Any,
        shares: Shares,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._exchange = exchange
        self._processes = processes
        self._local = local
        self._shares = shares
        self._compressor = compressor

    @property
    def _num_between_graph_workers(self) -> int:
        return self._processes

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """See `tf.distribute.CrossDeviceOps`."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """See `tf.distribute.CrossDeviceOps`. The pairs' order is taken for that of the forward pass."""
        is_weighed = isinstance(options, private.WeighedOptions)
        if self._shares.step_is_shared and not is_weighed:
            value_destination_pairs = [(self._of_samples(value), where) for value, where in value_destination_pairs]
        if self._processes == 1:
            return self._local.batch_reduce(reduce_op, value_destination_pairs)
        replicas = [len(value.values) for value, _ in value_destination_pairs]
        names = [_name(value.values[0], destination) for value, destination in value_destination_pairs]
        values = [self._sum_locally(value) for value, _ in value_destination_pairs]
        sums = self._sum_over_processes(values, names, self._compressed(values, options))
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            sums = [_divide(total, self._processes * count) for total, count in zip(sums, replicas, strict=True)]
        return [
            private.simple_broadcast(total, destinations, always_mirrored=True)
            for total, (_, destinations) in zip(sums, value_destination_pairs, strict=True)
        ]

    def _of_samples(self, value: Any) -> Any:
        """What replicas without samples contribute is zero."""
        if self._processes * len(value.values) == 1:
            return value
        rows = self._shares.rows_of_replicas()
        return private.PerReplica([_zero_if_empty(v, n) for v, n in zip(value.values, rows, strict=True)])

    def _sum_locally(self, value: Any) -> Any:
        """Over this process's devices, to the first of them."""
        if len(value.values) == 1:
            return value.values[0]
        if isinstance(value.values[0], tf.IndexedSlices):
            return private.concat_slices(value.values, tf.add_n)
        reduced = self._local.reduce(tf.distribute.ReduceOp.SUM, value, destinations=value)
        return reduced.values[0] if isinstance(reduced, private.DistributedValues) else reduced

    def _compressed(self, values: Sequence[Any], options: Any) -> list[Compressed | None]:
        """How each value is compressed, if it is the dense gradient of a variable."""
        if self._compressor is None or not getattr(options, "variables", ()):
            return [None] * len(values)
        return [
            None if isinstance(value, tf.IndexedSlices) else self._compressor.tensor(variable, value)
            for value, variable in zip(values, options.variables, strict=True)
        ]

    def _sum_over_processes(
        self, values: Sequence[Any], names: Sequence[str], compressed: Sequence[Compressed | None]
    ) -> list[Any]:
        sums = list(values)
        dense = [place for place, value in enumerate(values) if not isinstance(value, tf.IndexedSlices)]
        dense.reverse()  # the last layer's gradient is there first
        totals = self._bridge.all_reduce(
            [values[place] for place in dense],
            names=[names[place] for place in dense],
            compressed=[compressed[place] for place in dense],
        )
        for place, total in zip(dense, totals, strict=True):
            sums[place] = total
        for place, value in enumerate(values):
            if isinstance(value, tf.IndexedSlices):
                sums[place] = self._bridge.all_reduce_slices(value, self._has_samples())
        return sums

    def _has_samples(self) -> tf.Tensor | None:
        """Whether any replica of this process has samples, a boolean scalar; None outside of shared steps."""
        if not self._shares.step_is_shared:
            return None
        return tf.add_n(self._shares.rows_of_replicas()) > 0

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """See `tf.distribute.CrossDeviceOps`: to this process's devices."""
        return private.simple_broadcast(tensor, destinations, always_mirrored=True)

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        local = (
            tf.concat(per_replica_value.values, axis)
            if len(per_replica_value.values) > 1
            else (per_replica_value.values[0])
        )
        gathered = self._exchange.all_gather(local, axis)
        return private.simple_broadcast(gathered, destinations, always_mirrored=True)


def _zero_if_empty(value: Any, rows: tf.Tensor) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_zero_if_empty(value.values, rows), value.indices, value.dense_shape)
    with tf.device(value.device):
        return tf.where(rows > 0, value, tf.zeros_like(value))


def _name(value: Any, destination: Any) -> str:
    """What a value is called in messages: as the variable that it is for, or as the operation that yields it."""
    if private.is_distributed_variable(destination):
        return destination.name
    tensor = value.values if isinstance(value, tf.IndexedSlices) else value
    if tf.is_symbolic_tensor(tensor):
        return tensor.name.removeprefix("gradient_tape/").removesuffix(":0")
    return "a value"


def _divide(total: Any, count: int) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(_divide(total.values, count), total.indices, total.dense_shape)
    return total / tf.cast(count, total.dtype)
