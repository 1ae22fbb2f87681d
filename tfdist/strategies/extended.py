"""The strategy's inner half: what `tf.distribute` calls, and what of `MirroredStrategy`'s differs here."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.cluster.world import World
from tfdist.compression.compressor import Compressor
from tfdist.engine import calibration
from tfdist.engine.bridge import Bridge
from tfdist.engine.exchange import Exchange
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.cross_device import ProcessCrossDeviceOps
from tfdist.strategies.sample_counts import SampleCounts, batch_size

log = logging.getLogger("tfdist")

_strategies = itertools.count()
_variables = itertools.count()


class AllReduceExtended(private.MirroredExtended):
    """`MirroredExtended` over the devices of this process, and over the processes of a world.

    Args:
        strategy: the strategy that this is the inner half of.
        world: the processes.
        devices: this process's.
        algorithm: the name of the all-reduce between processes.
        compressor: knows the variables whose gradients are compressed; None where none are.

    Raises:
        MismatchError: another process has another number of devices, another algorithm or other compression.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        world: World,
        devices: list[str],
        algorithm: str,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__(strategy, devices=devices)
        self.world = world
        self.sample_counts = SampleCounts()
        self.compressor = compressor
        self.exchange = Exchange(world.engine)
        settings = f"{len(devices)} device(s), the algorithm {algorithm} and the compression {compressor}"
        self.exchange.broadcast_once(tf.constant(0), f"the settings of strategy {next(_strategies)}", settings)
        self.bridge = Bridge(world.engine, algorithm, calibration.agreed(world.engine, algorithm))
        self._local_only = 0
        self.is_reading_for_all = False
        own: Any = self._cross_device_ops  # type: ignore[has-type]
        local = private.ReductionToOneDevice() if _on_cpu(devices) else own
        self._cross_device_ops = ProcessCrossDeviceOps(
            self.bridge, self.exchange, world.size, local, self.sample_counts, compressor
        )

    @contextlib.contextmanager
    def local_only(self) -> Iterator[None]:
        """Reads of variables that are kept apart per replica (metrics) stay inside this process.

        For what the chief does alone: it must not wait for ranks that do not come.
        """
        self._local_only += 1
        try:
            yield
        finally:
            self._local_only -= 1

    @contextlib.contextmanager
    def reading_for_all(self) -> Iterator[None]:
        """Weights that are loaded inside are handed on to the other ranks by whoever loads them."""
        self.is_reading_for_all = True
        try:
            yield
        finally:
            self.is_reading_for_all = False

    # Reductions.

    def _use_merge_call(self) -> bool:
        return True

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if len(self.worker_devices) > 1:
            return super()._call_for_each_replica(fn, args, kwargs)
        # One replica needs no thread of its own. Without one it can synchronize anywhere, also inside the
        # conditionals of Keras's gradient accumulation and loss scaling.
        args, kwargs = private.select_replica(0, args), private.select_replica(0, kwargs)
        replica_id = self._get_replica_id_in_sync_group(0)
        with tf.device(self.worker_devices[0]), private.ReplicaContext(self._container_strategy(), replica_id):
            return fn(*args, **kwargs)

    def _get_cross_device_ops(self, value: Any) -> Any:
        return self._cross_device_ops

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if self._local_only:
            return _reduce_locally(reduce_op, value)

        def reduce_one(part: Any) -> Any:
            if private.is_mirrored(part):
                if reduce_op == tf.distribute.ReduceOp.MEAN:
                    return part
                raise ValueError("a value that is the same on all replicas cannot be summed over them; reduce by MEAN")
            if not isinstance(part, private.DistributedValues):
                part = tf.convert_to_tensor(part)
            return self._cross_device_ops.reduce(reduce_op, part, destinations, self._communication_options)

        return tf.nest.map_structure(reduce_one, value)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        return self._cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, options)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return self._cross_device_ops._gather(value, destinations, axis, self._communication_options)

    # Variables.

    def _get_variable_creator_initial_value(self, replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        if replica_id:
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        exchange, number = self.exchange, next(_variables)

        def of_the_chief() -> tf.Tensor:
            value = kwargs["initial_value"]
            if callable(value):
                value = value()
            if isinstance(value, private.CheckpointInitialValue):
                value = value.wrapped_value
            value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            name = kwargs.get("name") or "a variable"
            return exchange.broadcast_once(
                value, f"the initial value of variable {number}", f"{name} {value.dtype.name} {value.shape}"
            )

        return of_the_chief

    # Input.

    def _input_context(self) -> Any:
        return private.InputContext(self.world.size, self.world.rank, self._num_replicas_in_sync)

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        _check_replication(options, "experimental_distribute_dataset")
        if self.world.size > 1:
            _warn_of_unseeded_shuffle(dataset)
        workers = self._input_workers_with_options(options)
        return private.distributed_dataset(dataset, workers, self._container_strategy(), self._input_context(), options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        if self.world.size > 1:
            _check_replication(options, "distribute_datasets_from_function")
        workers = self._input_workers_with_options(options)
        return private.distributed_datasets_from_function(
            dataset_fn, workers, self._container_strategy(), self._input_context(), options
        )

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        local = [
            value_fn(private.ValueContext(self._get_replica_id_in_sync_group(replica), self._num_replicas_in_sync))
            for replica in range(len(self.worker_devices))
        ]
        return private.regroup(local, always_wrap=True)

    def count(self, optionals: list[Any]) -> tf.Tensor:
        """How many replicas have another batch, over all processes; notes the samples of the step on the way."""
        filled = tf.add_n([tf.cast(optional.has_value(), tf.int64) for optional in optionals])
        samples = tf.add_n(
            [
                tf.cond(
                    optional.has_value(),
                    lambda optional=optional: batch_size(optional.get_value()),
                    lambda: tf.constant(0, tf.int64),
                )
                for optional in optionals
            ]
        )
        counts = self.bridge.all_reduce([tf.stack([filled, samples])], names=["who has another batch"])[0]
        with tf.control_dependencies([self.sample_counts.set_total(counts[1])]):
            return tf.identity(counts[0])

    # Who is who.

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.world.size * len(self.worker_devices)

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> Any:
        return self.world.rank * len(self.worker_devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group - self.world.rank * len(self.worker_devices)

    def _in_multi_worker_mode(self) -> bool:
        return self.world.size > 1

    @property
    def experimental_between_graph(self) -> bool:
        """See `tf.distribute.StrategyExtended`."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the one that writes checkpoints."""
        return self.world.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one that writes summaries."""
        return self.world.is_chief


def _reduce_locally(reduce_op: Any, value: Any) -> Any:
    parts = value.values if isinstance(value, private.DistributedValues) else (value,)
    total = tf.add_n([tf.convert_to_tensor(part) for part in parts])
    return total / len(parts) if reduce_op == tf.distribute.ReduceOp.MEAN else total


def _on_cpu(devices: list[str]) -> bool:
    return all("cpu" in device.lower() for device in devices)


def _check_replication(options: Any, method: str) -> None:
    if options and options.experimental_replication_mode == private.InputReplicationMode.PER_REPLICA:
        raise ValueError(
            f"{method}: InputReplicationMode.PER_REPLICA is not supported; tfdist makes one dataset per process "
            "(PER_WORKER) and deals its batches out to the process's devices."
        )


def _warn_of_unseeded_shuffle(dataset: Any) -> None:
    """Processes that shuffle one dataset differently see some samples twice and others never."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == tf.data.experimental.AutoShardPolicy.OFF:
        return
    pending = [dataset]
    while pending:
        current = pending.pop()
        pending += current._inputs()
        if "Shuffle" in type(current).__name__ and int(current._seed) == int(current._seed2) == 0:
            log.warning(
                "tfdist: this dataset is shuffled without a seed, so every process shuffles it in its own way and "
                "some samples are seen twice, others never. Pass seed= to shuffle(), or call "
                "keras.utils.set_random_seed() with the same number on every process before you build it."
            )
            return
