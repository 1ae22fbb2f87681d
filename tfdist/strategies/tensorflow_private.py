"""Every private module of TensorFlow that tfdist uses, imported here and nowhere else.

Checked on TensorFlow 2.18 and 2.21. What may change between versions, and what tfdist expects of it:

- ``mirrored_strategy.MirroredExtended`` runs replicas on one process's devices and leaves ``_cross_device_ops``,
  the dataset methods, ``_reduce_to`` and the replica ids to be overridden.
- ``input_lib._calculate_replicas_with_values`` is called once per step of a distributed iterator, with the
  optionals of all local replicas; its result decides, on all processes alike, whether there is another step.
- ``multi_device_iterator_ops._create_device_dataset`` makes what brings batches to one device.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import (
    collective_util,
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
    input_lib,
    mirrored_strategy,
    values,
    values_util,
)
from tensorflow.python.eager import context
from tensorflow.python.trackable import base as trackable

__all__ = [
    "CheckpointInitialValue",
    "CrossDeviceOps",
    "DistributedValues",
    "InputContext",
    "InputReplicationMode",
    "InputWorkers",
    "MirroredExtended",
    "PerReplica",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ValueContext",
    "WeighedOptions",
    "as_number",
    "concat_slices",
    "copies",
    "distributed_dataset",
    "distributed_datasets_from_function",
    "global_seed",
    "install",
    "is_distributed_variable",
    "is_mirrored",
    "local_replica_id",
    "not_tuned",
    "parts_of",
    "per_replica",
    "reads_files",
    "regroup",
    "seeded",
    "select_replica",
    "simple_broadcast",
    "spec_of_replicas",
    "without_rows",
]

CrossDeviceOps = cross_device_ops.CrossDeviceOps
ReductionToOneDevice = cross_device_ops.ReductionToOneDevice
simple_broadcast = cross_device_ops.simple_broadcast
concat_slices = cross_device_utils.aggregate_tensors_or_indexed_slices
InputContext = distribute_lib.InputContext
InputWorkers = input_lib.InputWorkers
InputReplicationMode = distribute_lib.InputReplicationMode
ValueContext = distribute_lib.ValueContext
ReplicaContext = distribute_lib.ReplicaContext
regroup = distribute_utils.regroup
select_replica = distribute_utils.select_replica
is_mirrored = distribute_utils.is_mirrored
MirroredExtended = mirrored_strategy.MirroredExtended
DistributedValues = values.DistributedValues
PerReplica = values.PerReplica
CheckpointInitialValue = trackable.CheckpointInitialValue
local_replica_id = values_util.get_current_replica_id_as_int


class WeighedOptions(collective_util.Options):
    """Options of a reduction whose contributions are weighed: those of an empty share already count for nothing.

    Args:
        variables: ids of the variables whose gradients are reduced, in their order; empty if there are none.
        weight: float64 scalar by which this process's contributions are yet to be multiplied; None if they are.
    """

    def __init__(self, variables: Sequence[str] = (), weight: Any = None) -> None:
        super().__init__()
        self.variables = tuple(variables)
        self.weight = weight


def is_distributed_variable(value: Any) -> bool:
    """Whether a value is a variable with a component on every local device."""
    return isinstance(value, values.DistributedVariable)


class _Number:
    """Keras calls float() and int() on the variables behind its own; TensorFlow gives these methods to others only."""

    def __float__(self: Any) -> float:
        return float(self.read_value().numpy())

    def __int__(self: Any) -> int:
        return int(self.read_value().numpy())


class _MirroredVariable(_Number, values.MirroredVariable):
    pass


class _SyncOnReadVariable(_Number, values.SyncOnReadVariable):
    pass


_NUMBERS = {values.MirroredVariable: _MirroredVariable, values.SyncOnReadVariable: _SyncOnReadVariable}


def as_number(variable: Any) -> Any:
    """A variable that was just made, of a class that float() and int() take."""
    # TensorFlow's `_create_variable` takes its classes from a table of the module, which is everybody's.
    variable.__class__ = _NUMBERS.get(type(variable), type(variable))
    return variable


def copies(variable: Any) -> tuple[Any, ...]:
    """The components of a variable, one on each local device."""
    return variable.values if is_distributed_variable(variable) else (variable,)


def distributed_dataset(dataset: Any, input_workers: Any, strategy: Any, context_: Any, options: Any) -> Any:
    """A `tf.distribute.DistributedDataset` whose every step counts replicas and samples over all processes.

    TensorFlow divides its batches and shards it, as its policy says.
    """
    distributed = _DistributedDataset(
        input_workers,
        strategy,
        not_tuned(dataset),
        num_replicas_in_sync=context_.num_replicas_in_sync,
        input_context=context_,
        options=_read_directly(input_workers, options),
    )
    return _counting(distributed, strategy)


def per_replica(values_of_replicas: list[Any], extended: Any) -> Any:
    """Values of the local replicas as one, as distributed iterators yield them."""
    return input_lib._create_per_replica(values_of_replicas, extended._container_strategy())


def spec_of_replicas(spec: Any, extended: Any) -> Any:
    """The type of `per_replica` of values of a type."""
    return input_lib._create_distributed_tensor_spec(extended._container_strategy(), spec)


def without_rows(spec: Any) -> Any:
    """A batch of a type, with no rows."""
    return input_lib._dummy_tensor_fn(spec)


def distributed_datasets_from_function(
    function: Callable[..., Any], input_workers: Any, strategy: Any, contexts: Sequence[Any], options: Any
) -> Any:
    """As `distributed_dataset`, of the datasets that the user's function makes, one for each context."""
    distributed = _DistributedDatasetsFromFunction(
        input_workers,
        strategy,
        input_contexts=list(contexts),
        dataset_fn=lambda its_context: not_tuned(function(its_context)),
        options=_read_directly(input_workers, options),
    )
    return _counting(distributed, strategy)


def _read_directly(input_workers: Any, options: Any) -> Any:
    """Options by which one replica on the CPU reads the dataset itself, without an iterator for several devices.

    Making such an iterator traces six functions anew, which takes 30 ms, and Keras makes two an epoch.
    """
    devices = [device for worker in range(input_workers.num_workers) for device in
               input_workers.compute_devices_for_worker(worker)]  # fmt: skip
    if input_workers.num_workers != len(devices) or any("CPU" not in device.upper() for device in devices):
        return options
    return _DIRECTLY


# One object for all datasets: TensorFlow tells iterators' types apart by it, and traces functions of them anew.
_DIRECTLY = distribute_lib.InputOptions(
    experimental_fetch_to_device=False, experimental_replication_mode=InputReplicationMode.PER_REPLICA
)

_FILE_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "ArrayRecordDataset")


def reads_files(dataset: Any) -> bool:
    """Whether `tf.data` would shard the dataset by files, as far as its rules go: it reads records of files."""
    for part in parts_of(dataset):
        if type(part).__name__.startswith(_FILE_READERS):
            return True
        for function in part._functions():
            graph = function.function.graph.as_graph_def()
            nodes = itertools.chain(graph.node, *(inner.node_def for inner in graph.library.function))
            if any(node.op.startswith(_FILE_READERS) for node in nodes):
                return True
    return False


def parts_of(dataset: Any) -> Iterator[Any]:
    """A dataset, and all that it is made of."""
    pending = [dataset]
    while pending:
        part = pending.pop()
        pending += part._inputs()
        yield part


def not_tuned(dataset: Any) -> Any:
    """The dataset without tf.data's tuner, unless the user has asked for it.

    An iterator that is dropped waits for its tuner's next turn, whose period doubles from 10 ms to a minute: it is
    woken before `CancellationManager.IsCancelled` is true, and goes to sleep again. An epoch could take twice as long.
    ``AUTOTUNE`` then stands for as many calls at once as there are cores, and prefetching works as before.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


class _Iterating(threading.local):
    """Whether the calling thread makes an iterator of a dataset of ours."""

    ours = False


_iterating = _Iterating()


class _BroughtWithoutTuning:
    """What brings batches to the devices has a tuner of its own, with nothing to tune."""

    def __iter__(self) -> Any:
        before, _iterating.ours = _iterating.ours, True
        try:
            return super().__iter__()  # type: ignore[misc]
        finally:
            _iterating.ours = before


class _DistributedDataset(_BroughtWithoutTuning, input_lib.DistributedDataset):
    pass


class _DistributedDatasetsFromFunction(_BroughtWithoutTuning, input_lib.DistributedDatasetsFromFunction):
    pass


def _counting(distributed: Any, strategy: Any) -> Any:
    # An infinite dataset may hold partial batches (`batch(64).repeat()`), and a dataset that the user's function
    # made may end earlier on this process than on others: neither may skip the count that keeps all in step.
    # A replica that is alone has nobody to keep step with, and keeps the static shapes of its batches.
    distributed._enable_get_next_as_optional = strategy.num_replicas_in_sync > 1
    distributed._cardinality = _UNKNOWN
    return distributed


_UNKNOWN = -2  # tf.data.UNKNOWN_CARDINALITY, as a number


def install(replace: Callable[..., None], counter_of: Callable[[Any], Callable[[list[Any]], Any] | None]) -> None:
    """Puts the seams of TensorFlow's own iterators in place.

    Args:
        replace: puts one function in the place of another.
        counter_of: what counts the replicas that have data, for a strategy: a function of the optionals of its local
            replicas that returns how many have a value, over all processes, as an int64 scalar. None where TensorFlow
            counts.
    """

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def calculate(strategy: Any, input_workers: Any, optional_list: list[list[Any]]) -> Any:
            counter = counter_of(strategy)
            if counter is None:
                return original(strategy, input_workers, optional_list)
            return counter([optional for optionals in optional_list for optional in optionals])

        return calculate

    def brought(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_device_dataset(*args: Any, **kwargs: Any) -> Any:
            dataset = original(*args, **kwargs)
            return not_tuned(dataset) if _iterating.ours else dataset

        return create_device_dataset

    replace(input_lib, "_calculate_replicas_with_values", counted)
    replace(multi_device_iterator_ops, "_create_device_dataset", brought)


def global_seed() -> int | None:
    """What `tf.random.set_seed` was given, or None."""
    return context.global_seed()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Gives operations that are created inside the seed, and leaves TensorFlow's generators as they were."""
    state = context.context()
    kept = state._seed, state._rng
    state._seed, state._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        state._seed, state._rng = kept
