"""The strategy's `extended`: the methods of `tf.distribute` that differ from those of `MirroredStrategy`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.compression.compressor import Compressor
from tfdist.engine import operations
from tfdist.engine.bridge import Bridge
from tfdist.engine.counts import CountReducer
from tfdist.engine.exchange import Exchange
from tfdist.engine.group import ProcessGroup
from tfdist.engine.tensorflow_sums import TensorFlowSums
from tfdist.notices import without_mirrored
from tfdist.private import datasets as private_datasets
from tfdist.private import tensorflow as private
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.all_reduce.cross_device import ProcessCrossDeviceOps
from tfdist.strategies.data import datasets
from tfdist.strategies.data.shares import Shares, batch_size
from tfdist.strategies.devices import requested_device
from tfdist.strategies.step_calls import StepCalls
from tfdist.strategies.stopping import Stopping
from tfdist.tensors import unnumbered

if TYPE_CHECKING:  # jobs without servers do not load these modules
    from tfdist.parameter_server.tables.client import TableClient, TableSpec
    from tfdist.parameter_server.tables.row_cache import CachePolicy
    from tfdist.strategies.servers.server_tables import ServerTables


_KEYS_OF_A_PROCESS = 1 << 17
"""Distance between the numbers of two processes' groups of devices."""
_key_bases = itertools.count(0, 1000)
"""Numbers from which TensorFlow numbers the groups of each strategy's devices."""


class AllReduceExtended(private.MirroredExtended, DataParallel):
    """`MirroredExtended` over the devices of this process and the processes of a group.

    Args:
        strategy: the strategy that this is the `extended` of.
        group: the processes that train together.
        devices: this process's devices.
        compressor: compressor of gradients; None sends full precision.
        checks_weights: whether `fit` compares the ranks' weights after each epoch.
        keep_rows: whether sparse gradients keep every occurrence of a row.
        tables: tables of rows on the job's parameter servers; None if the job has no servers.
        home: the device that variables are on, a copy for each replica; None places each copy on its replica's device.
        float32_sums: whether gradients of half precision are summed in float32.
        by_tensorflow: makes sums of gradients by TensorFlow's collectives; None has the group's engine sum them.

    Raises:
        MismatchError: another process has another number of devices, another algorithm or other compression.
    """

    more = ""
    """Settings of a subclass that must be equal on all processes, as text for their comparison."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        group: ProcessGroup,
        devices: list[str],
        compressor: Compressor | None = None,
        checks_weights: bool = True,
        keep_rows: bool = True,
        tables: ServerTables | None = None,
        home: str | None = None,
        float32_sums: bool = False,
        by_tensorflow: Callable[[], TensorFlowSums] | None = None,
    ) -> None:
        # Compared before TensorFlow's first operation, which the set-up of its collectives must precede.
        settings = (
            f"{len(devices)} device(s), the algorithm {'tensorflow' if by_tensorflow else group.algorithm} and the "
            f"compression {compressor}{self.more}{', float32_sums=True' * float32_sums}"
        )
        group.run(f"the settings of strategy {group.number('strategy')}", operations.barrier(), settings)
        self._by_tensorflow = None if by_tensorflow is None else by_tensorflow()
        # TensorFlow binds the number of a collective among this process's GPUs to a shape, also after its strategy. If
        # it knows other processes, their GPUs have other numbers.
        strategy._collective_key_base = next(_key_bases) + group.engine.rank * _KEYS_OF_A_PROCESS
        with without_mirrored():
            super().__init__(strategy, devices=devices)
        self.checks_weights = checks_weights
        self.group = group
        self._home = home
        self.float32_sums = float32_sums
        # As in TensorFlow's multi-worker strategies. KerasTuner names temporary folders after them.
        self._task_type, self._task_id = "worker", group.rank
        self.shares = Shares(len(devices))
        self.compressor = compressor
        self._tables = tables
        self.exchange = Exchange(group)
        self.bridge = Bridge(group)
        self.stopping = Stopping()
        self._counts = CountReducer(group, "ranks with another batch", self.stopping.own, self.stopping.learn)
        self._local_only = 0
        self._reads_for_keras: StepCalls | None = None
        self._reads_in_order = False
        default_ops: Any = self._cross_device_ops  # type: ignore[has-type]
        local = private.ReductionToOneDevice() if _on_cpu(devices) or len(devices) == 1 else default_ops
        self._cross_device_ops = ProcessCrossDeviceOps(
            group, local, self.shares, compressor, keep_rows, self._by_tensorflow
        )

    @contextlib.contextmanager
    def local_only(self) -> Iterator[None]:
        """Context in which reads of per-replica variables (metrics) and of distributed data stay inside this process.

        The chief uses it for work of its own, which must not wait for ranks that do not take part.
        """
        self._local_only += 1
        try:
            yield
        finally:
            self._local_only -= 1

    # Reductions.

    def _use_merge_call(self) -> bool:
        return True

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if len(self.worker_devices) > 1:
            return super()._call_for_each_replica(fn, args, kwargs)
        # A single replica runs in the calling thread. It can then synchronize anywhere, also inside the conditionals
        # of Keras's gradient accumulation and loss scaling.
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
            is_sum = reduce_op == tf.distribute.ReduceOp.SUM
            if is_sum and len(self.worker_devices) > 1 and not isinstance(part, private.DistributedValues):
                raise ValueError(
                    f"reduce: a sum needs one value for each of this process's {len(self.worker_devices)} replicas, "
                    f"such as strategy.run returns; got the single value {part}."
                )
            if private.is_mirrored(part):
                if reduce_op == tf.distribute.ReduceOp.MEAN:
                    return part
                raise ValueError(
                    "reduce: a value that is the same on all replicas cannot be summed over them; use ReduceOp.MEAN"
                )
            if not isinstance(part, private.DistributedValues):
                part = tf.convert_to_tensor(part)
            where = self._where(destinations)
            return self._cross_device_ops.reduce(reduce_op, part, where, self._communication_options)

        return tf.nest.map_structure(reduce_one, value)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        pairs = [(value, self._where(destinations)) for value, destinations in value_destination_pairs]
        return self._cross_device_ops.batch_reduce(reduce_op, pairs, options)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return self._cross_device_ops._gather(value, self._where(destinations), axis, self._communication_options)

    def _where(self, destinations: Any) -> Any:
        """Returns the destinations of a result; the first device if the value's device is unknown, as in a function."""
        return self.worker_devices[0] if isinstance(destinations, str) and not destinations else destinations

    # Variables.

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        creator = requested_device.creating(next_creator, len(self.worker_devices), self._home)
        return private.as_number(super()._create_variable(creator, **kwargs))

    def _get_variable_creator_initial_value(self, replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        if replica_id:
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        if self._local_only:
            return kwargs["initial_value"]
        number = self.group.number("variable")

        def value_of_the_chief() -> tf.Tensor:
            value = kwargs["initial_value"]
            if callable(value):
                value = value()
            if isinstance(value, private.CheckpointInitialValue):
                value = value.wrapped_value
            value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            return self.value_of_the_chief(value, kwargs.get("name") or "a variable", number)

        def of_the_chief() -> tf.Tensor:
            if tf.executing_eagerly() or not callable(kwargs["initial_value"]):
                return value_of_the_chief()
            # All processes are tracing a function that creates variables: broadcast the values outside its graph.
            with tf.init_scope():
                value = value_of_the_chief().numpy()
            return tf.constant(value)

        return of_the_chief

    def value_of_the_chief(self, value: tf.Tensor, name: str, number: int) -> tf.Tensor:
        """Broadcasts the chief's initial value of a variable.

        Args:
            value: this process's initial value.
            name: name of the variable, for messages.
            number: number of the variable, which counts those of all processes alike.
        """
        signature = f"{unnumbered(name)} {value.dtype.name} {value.shape}"
        return self.exchange.broadcast_once(value, f"the initial value of variable {number}", signature)

    # Input.

    def _input_context(self) -> Any:
        return private.InputContext(self.group.size, self.group.rank, self._num_replicas_in_sync)

    def _context_of_functions(self) -> Any:
        """Returns the input context for a user's function that makes this process's dataset."""
        return self._input_context()

    @contextlib.contextmanager
    def reading_for_keras(self, calls: StepCalls) -> Iterator[None]:
        """Context in which distributed datasets yield a `Share` to Keras steps; see `DataParallel`."""
        self._reads_for_keras = calls
        try:
            yield
        finally:
            self._reads_for_keras = None

    @contextlib.contextmanager
    def reading_in_order(self) -> Iterator[None]:
        """Context in which all processes read the same batches of a dataset; gathered outputs keep its order."""
        self._reads_in_order = True
        try:
            yield
        finally:
            self._reads_in_order = False

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        if _is_per_replica(options):
            raise ValueError(
                "experimental_distribute_dataset: InputReplicationMode.PER_REPLICA is not supported, as one dataset is "
                "cut into shares for all replicas; call distribute_datasets_from_function to make one for each replica."
            )
        if self._reads_for_keras and not self.has_several_replicas:
            # Like Keras without a strategy: iterators over devices cost more than a small step.
            return private_datasets.not_tuned(dataset)
        if self.group.size > 1:
            datasets.warn_of_unseeded_shuffle(dataset)
            datasets.warn_of_own_shards(dataset, self.group.size, self.group.rank)
            if self._reads_in_order:
                datasets.warn_of_own_samples(dataset)
        if self.has_several_replicas and (self._reads_in_order or datasets.is_cut_by_samples(dataset, self.group.size)):
            return datasets.SharedDataset(dataset, self, self._reads_for_keras)
        workers = self._input_workers_with_options(options)
        return private_datasets.distributed_dataset(
            dataset, workers, self._container_strategy(), self._input_context(), options
        )

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        strategy = self._container_strategy()
        if not _is_per_replica(options):
            workers = self._input_workers_with_options(options)
            contexts = [self._context_of_functions()]
        else:
            workers = private.InputWorkers([("/device:CPU:0", (device,)) for device in self.worker_devices])
            replicas = self._num_replicas_in_sync
            contexts = [
                private.InputContext(replicas, self._get_replica_id_in_sync_group(device), replicas)
                for device in range(len(self.worker_devices))
            ]
        return private_datasets.distributed_datasets_from_function(dataset_fn, workers, strategy, contexts, options)

    @property
    def is_local_only(self) -> bool:
        """Whether the caller is inside `local_only`."""
        return self._local_only > 0

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        local = [
            value_fn(private.ValueContext(self._get_replica_id_in_sync_group(replica), self._num_replicas_in_sync))
            for replica in range(len(self.worker_devices))
        ]
        return private.regroup(local, always_wrap=True)

    def count(self, optionals: list[Any]) -> tf.Tensor:
        """Counts the replicas of all processes that have another batch; records the samples of the step."""
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
        return self.count_step(filled, samples)

    def count_step(self, filled: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        """Sums the replicas and samples of the processes that take the next step together; records the samples.

        Args:
            filled: the number of local replicas that have another batch, an int64 scalar.
            samples: the number of their samples, an int64 scalar.

        Returns:
            The number of these processes' replicas that have another batch, an int64 scalar.
        """
        counts = tf.stack([filled, samples])
        together = self.synchronizes_steps or (self._reads_in_order and self.runs_in_lockstep)  # `predict` gathers
        if together and self.group.size > 1 and not self.is_local_only:
            counts = self._counts.sum(counts, self.stopping.kept if self.stopping.is_in_step else None)
        replicas, total = tf.unstack(counts)
        with tf.control_dependencies([self.shares.set_total(total)]):
            return tf.identity(replicas)

    # Ranks and replicas.

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the group's communication, or that with parameter servers; else None."""
        return self.group.failure or (None if self._tables is None else self._tables.failure)

    def cause_of(self, error: tf.errors.OpError) -> BaseException | None:
        """Returns the error of tfdist that an error of TensorFlow has come from; see `Ability.cause_of`."""
        cause = self.failure or self.group.engine.cause_of(error.message)
        return cause or (None if self._by_tensorflow is None else self._by_tensorflow.cause_of(error))

    def table(self, name: str, form: TableSpec, cache: CachePolicy | None = None) -> TableClient | None:
        """Returns a table of an embedding's rows on the servers; see `tfdist.strategies.abilities.Ability`."""
        if self._tables is None:
            return None
        if len(self.worker_devices) > 1 or not self.group.is_world:
            raise ValueError(
                f"rows of the layer {name} on parameter servers are trained by all processes of a job, each with one "
                f"device; got {len(self.worker_devices)} devices in {self.group}. Use one process for each device, and "
                "no group=."
            )
        return self._tables.table(name, form, cache)

    @property
    def is_writer(self) -> bool:
        """Whether this process writes for its group."""
        return self.group.is_writer

    @property
    def takes_part_in_saving(self) -> bool:
        """Whether each process takes part when the writer saves: with compression, each saves its residuals."""
        return self.compressor is not None or super().takes_part_in_saving

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.group.size * len(self.worker_devices)

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> Any:
        return self.group.rank * len(self.worker_devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group - self.group.rank * len(self.worker_devices)

    def _in_multi_worker_mode(self) -> bool:
        return self.group.size > 1

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process builds its own graph; see `tf.distribute.StrategyExtended`."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return self.is_writer

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries."""
        return self.is_writer


def _reduce_locally(reduce_op: Any, value: Any) -> Any:
    parts = value.values if isinstance(value, private.DistributedValues) else (value,)
    total = tf.add_n([tf.convert_to_tensor(part) for part in parts])
    return total / len(parts) if reduce_op == tf.distribute.ReduceOp.MEAN else total


def _on_cpu(devices: list[str]) -> bool:
    return all("cpu" in device.lower() for device in devices)


def _is_per_replica(options: Any) -> bool:
    return bool(options) and options.experimental_replication_mode == private.InputReplicationMode.PER_REPLICA
