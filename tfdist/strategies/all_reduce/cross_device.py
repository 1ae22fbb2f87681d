"""Reductions over all replicas: inside the process by TensorFlow, between processes by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.compressor import Compressed, Compressor
from tfdist.engine import buckets
from tfdist.engine.exchange import Exchange
from tfdist.engine.group import ProcessGroup
from tfdist.engine.posting import concatenated, split
from tfdist.engine.slices import with_distinct_rows
from tfdist.engine.sums import Sums, divided
from tfdist.engine.tensorflow_sums import TensorFlowSums
from tfdist.private import tensorflow as private
from tfdist.strategies.data.shares import Shares
from tfdist.strategies.keras import sparse_gradients
from tfdist.tensors import map_values

_PACKING = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=buckets.BUCKET_BYTES)


class ProcessCrossDeviceOps(private.CrossDeviceOps):
    """A `tf.distribute.CrossDeviceOps` that spans processes.

    Args:
        group: the processes to reduce over.
        local: TensorFlow's operations among this process's devices.
        shares: the number of samples of each replica in the current step.
        compressor: compressor of gradients; None sends full precision.
        keep_rows: whether sparse gradients keep every occurrence of a row, as on one process.
        by_tensorflow: sums of gradients by TensorFlow's collectives; None has the group's engine sum them.
    """

    def __init__(
        self,
        group: ProcessGroup,
        local: Any,
        shares: Shares,
        compressor: Compressor | None = None,
        keep_rows: bool = True,
        by_tensorflow: TensorFlowSums | None = None,
    ) -> None:
        super().__init__()
        self._by_tensorflow = by_tensorflow
        self._keep_rows = keep_rows
        self._sums, self._exchange = Sums(group), Exchange(group)
        self._processes = group.size
        self.local = local
        self._shares = shares
        self._compressor = compressor

    @property
    def _num_between_graph_workers(self) -> int:
        return self._processes

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """Reduces one value over all replicas; see `tf.distribute.CrossDeviceOps`."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """Reduces values over all replicas; see `tf.distribute.CrossDeviceOps`.

        The pairs are assumed to be in the order of the forward pass.
        """
        is_weighed = isinstance(options, private.WeighedOptions)
        if self._shares.step_is_shared and not is_weighed:
            value_destination_pairs = [(self._of_samples(value), where) for value, where in value_destination_pairs]
        if self._processes == 1 and not is_weighed:
            reduced = self._among_devices(reduce_op, value_destination_pairs)
            return [
                _equal_on_devices(total, where)
                for total, (_, where) in zip(reduced, value_destination_pairs, strict=True)
            ]
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        names = [_name(value.values[0], destination) for value, destination in value_destination_pairs]
        common = [self._common_indices(value) for value, _ in value_destination_pairs]
        values = self._locally(
            [
                value if indices is None else _rows(value)
                for (value, _), indices in zip(value_destination_pairs, common, strict=True)
            ],
            is_mean,
        )
        totals = self._over_processes(values, names, options, is_mean)
        for place, indices in enumerate(common):
            if indices is not None:
                shape = value_destination_pairs[place][0].values[0].dense_shape
                totals[place] = with_distinct_rows(tf.IndexedSlices(totals[place], indices, shape))
        return self._copied(totals, [where for _, where in value_destination_pairs])

    def _of_samples(self, value: Any) -> Any:
        """Sets the contributions of replicas without samples to zero."""
        if self._processes * len(value.values) == 1:
            return value
        rows = self._shares.rows_of_replicas()
        return private.PerReplica([_zero_if_empty(v, n) for v, n in zip(value.values, rows, strict=True)])

    def _common_indices(self, value: Any) -> tf.Tensor | None:
        """Returns the indices of a sparse gradient whose rows are the same on all replicas; None for other values."""
        parts = value.values
        if not self._shares.step_is_shared or not isinstance(parts[0], tf.IndexedSlices):
            return None
        return None if any(sparse_gradients.are_of_samples(part) for part in parts) else parts[0].indices

    def _locally(self, values: Sequence[Any], is_mean: bool) -> list[Any]:
        """Returns the sums or means over this process's devices, on the first of them."""
        results: dict[int, Any] = {}
        shared: dict[int, Any] = {}
        for place, value in enumerate(values):
            parts = value.values
            if isinstance(parts[0], tf.IndexedSlices):
                slices = private.concat_slices(parts, tf.add_n) if len(parts) > 1 else parts[0]
                results[place] = divided(slices, len(parts)) if is_mean else slices
                continue
            if is_mean and parts[0].dtype.is_integer:  # a mean of integers is floating point, as in TensorFlow
                parts = tuple(tf.cast(part, tf.float64) for part in parts)
            if len(parts) == 1:
                results[place] = parts[0]
            else:
                shared[place] = private.PerReplica(parts)
        totals = self._among_devices(tf.distribute.ReduceOp.SUM, [(value, value) for value in shared.values()])
        for (place, value), total in zip(shared.items(), totals, strict=True):
            first = total.values[0] if isinstance(total, private.DistributedValues) else total
            results[place] = first / tf.cast(len(value.values), first.dtype) if is_mean else first
        return [results[place] for place in range(len(values))]

    def _among_devices(self, reduce_op: Any, pairs: Sequence[Any]) -> list[Any]:
        """Reduces values over this process's devices. TensorFlow packs those of a dtype, where NCCL reduces them."""
        places: dict[tf.DType, list[int]] = {}
        for place, (value, _) in enumerate(pairs):
            places.setdefault(value.values[0].dtype, []).append(place)
        results: dict[int, Any] = {}
        for members in places.values():
            totals = self.local.batch_reduce(reduce_op, [pairs[place] for place in members], _PACKING)
            results.update(zip(members, totals, strict=True))
        return [results[place] for place in range(len(pairs))]

    def _over_processes(self, values: Sequence[Any], names: Sequence[str], options: Any, is_mean: bool) -> list[Any]:
        """Returns the sum or mean over processes of each process's sum or mean."""
        weighed = options if isinstance(options, private.WeighedOptions) else None
        weight = None if weighed is None else weighed.weight
        compressed = self._compressed(values, weighed)
        totals: dict[int, Any] = {}
        if self._by_tensorflow is not None and weighed is not None:
            places = [place for place, how in enumerate(compressed) if how is None]
            # The last layer's gradient is ready first.
            places = [place for place in reversed(places) if self._by_tensorflow.takes(values[place])]
            sums = self._by_tensorflow.all_reduce([values[place] for place in places], weight)
            totals.update(zip(places, sums, strict=True))
        rest = [place for place in range(len(values)) if place not in totals]
        if rest:
            sums = self._sums.all_reduce(
                [values[place] for place in rest],
                [names[place] for place in rest],
                [compressed[place] for place in rest],
                mean=is_mean,
                weight=weight,
                contributes=self._has_samples() if weight is None else None,
                keep_rows=self._keep_rows,
                in_memory=isinstance(options, private.StaticOptions),
            )
            totals.update(zip(rest, sums, strict=True))
        return [totals[place] for place in range(len(values))]

    def _compressed(self, values: Sequence[Any], options: private.WeighedOptions | None) -> list[Compressed | None]:
        """Returns how each value is compressed; None for values that are not dense gradients of a variable."""
        if self._compressor is None or options is None or not options.variables:
            return [None] * len(values)
        return [
            None
            if variable is None or isinstance(value, tf.IndexedSlices)
            else self._compressor.tensor(variable, value)
            for value, variable in zip(values, options.variables, strict=True)
        ]

    def _has_samples(self) -> tf.Tensor | None:
        """Returns whether any replica of this process has samples, a boolean scalar; None outside of shared steps."""
        if not self._shares.step_is_shared:
            return None
        return tf.add_n(self._shares.rows_of_replicas()) > 0

    def _copied(self, totals: Sequence[Any], destinations: Sequence[Any]) -> list[Any]:
        """Copies values to devices. Small ones of a dtype are one vector on the way, unless one device reduces all."""
        results: dict[int, Any] = {}
        devices = [private.get_devices_from(where) for where in destinations]
        packs = not isinstance(self.local, private.ReductionToOneDevice)
        dense = [
            place for place, total in enumerate(totals) if packs and len(devices[place]) > 1 and _has_known_shape(total)
        ]
        sizes = [totals[place].shape.num_elements() * totals[place].dtype.size for place in dense]
        for bucket in buckets.plan(sizes, [(totals[place].dtype, devices[place]) for place in dense]):
            members = [dense[member] for member in bucket.members]
            packed = concatenated([totals[place] for place in members])
            parts = []
            for copy in _mirrored(packed, destinations[members[0]]).values:
                with tf.device(copy.device):
                    parts.append(split(copy, [totals[place].shape for place in members]))
            for place, *copies in zip(members, *parts, strict=True):
                results[place] = private.Mirrored(copies)
        for place, total in enumerate(totals):
            if place not in results:
                results[place] = _equal_on_devices(_mirrored(total, destinations[place]), destinations[place])
        return [results[place] for place in range(len(totals))]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to this process's devices only; see `tf.distribute.CrossDeviceOps`."""
        return _mirrored(tensor, destinations)

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        local = (
            tf.concat(per_replica_value.values, axis)
            if len(per_replica_value.values) > 1
            else (per_replica_value.values[0])
        )
        gathered = self._exchange.all_gather(local, axis)
        return _mirrored(gathered, destinations)


def _mirrored(value: Any, destinations: Any) -> Any:
    """Copies a value to each device."""
    return private.simple_broadcast(value, destinations, always_mirrored=True)


def _has_known_shape(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.is_fully_defined()


def _equal_on_devices(total: Any, destinations: Any) -> Any:
    """Adds up rows of the same index once, where several GPUs would each do so in an order of its own."""
    copies: tuple[Any, ...] = total.values if isinstance(total, private.DistributedValues) else ()
    if len(copies) < 2 or not isinstance(copies[0], tf.IndexedSlices):
        return total
    return _mirrored(with_distinct_rows(copies[0]), destinations)


def _rows(value: Any) -> Any:
    return private.PerReplica([part.values for part in value.values])


def _zero_if_empty(value: Any, rows: tf.Tensor) -> Any:
    def zero_if_empty(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tensor.device):
            return tf.where(rows > 0, tensor, tf.zeros_like(tensor))

    return map_values(zero_if_empty, value)


def _name(value: Any, destination: Any) -> str:
    """Returns the name of a value in messages: its variable's name, or that of the operation that yields it."""
    if private.is_distributed_variable(destination):
        return destination.name
    tensor = value.values if isinstance(value, tf.IndexedSlices) else value
    if tf.is_symbolic_tensor(tensor):
        return tensor.name.removeprefix("gradient_tape/").removesuffix(":0")
    return "a value"
