"""Every private module of TensorFlow that tfdist uses, imported here and nowhere else.

Checked on TensorFlow 2.18 and 2.21. tfdist relies on the following, which may change between versions:

- ``mirrored_strategy.MirroredExtended`` runs replicas on one process's devices and leaves ``_cross_device_ops``,
  the dataset methods, ``_reduce_to`` and the replica ids to be overridden.
- ``input_lib._calculate_replicas_with_values`` is called once per step of a distributed iterator, with the
  optionals of all local replicas; its result decides, equally on all processes, whether there is another step.
- ``from_generator_op._GeneratorDataset`` makes elements by calling a function until that raises ``OutOfRangeError``.
- ``multi_device_iterator_ops._create_device_dataset`` makes the dataset that copies batches to one device.
- ``Graph.experimental_acd_manager`` orders the stateful operations of a function, and leaves out those it is told to.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops import from_generator_op, multi_device_iterator_ops
from tensorflow.python.data.util import structure
from tensorflow.python.distribute import (
    collective_util,
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
    input_lib,
    mirrored_strategy,
    one_device_strategy,
    values,
    values_util,
)
from tensorflow.python.eager import backprop, context, record
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs, resource_variable_ops
from tensorflow.python.trackable import base as trackable

from tfdist.thread_values import ThreadValue

__all__ = [
    "CheckpointInitialValue",
    "CrossDeviceOps",
    "DistributedValues",
    "InputContext",
    "InputReplicationMode",
    "InputWorkers",
    "Mirrored",
    "MirroredExtended",
    "NoneSpec",
    "OneDeviceExtended",
    "OwnOptions",
    "PerReplica",
    "ReductionToOneDevice",
    "ReplicaContext",
    "StaticOptions",
    "ValueContext",
    "WeighedOptions",
    "abort_collectives",
    "as_number",
    "captured",
    "concat_slices",
    "container_of",
    "copies",
    "distributed_dataset",
    "distributed_datasets_from_function",
    "enable_collectives",
    "function_of",
    "generated",
    "get_devices_from",
    "global_seed",
    "input_lib",
    "is_branch_or_loop",
    "is_compiled_by_xla",
    "is_distributed_variable",
    "is_iterating_ours",
    "is_mirrored",
    "keeps_order",
    "local_replica_id",
    "local_spec",
    "multi_device_iterator_ops",
    "new_variable",
    "not_tuned",
    "own_task",
    "parts_of",
    "per_replica",
    "reads_files",
    "regroup",
    "replace_gradient_function",
    "replace_recording",
    "seeded",
    "select_replica",
    "shard_of",
    "shuffles_anew",
    "shuffles_by_chance",
    "simple_broadcast",
    "spec_of_replicas",
    "stop_recording",
    "unordered",
    "with_gradient",
    "without_rows",
]

CrossDeviceOps = cross_device_ops.CrossDeviceOps
ReductionToOneDevice = cross_device_ops.ReductionToOneDevice
get_devices_from = cross_device_ops.get_devices_from
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
OneDeviceExtended = one_device_strategy.OneDeviceExtended
DistributedValues = values.DistributedValues
Mirrored = values.Mirrored
PerReplica = values.PerReplica
stop_recording = record.stop_recording
new_variable = resource_variable_ops.default_variable_creator_v2
CheckpointInitialValue = trackable.CheckpointInitialValue
local_replica_id = values_util.get_current_replica_id_as_int


NoneSpec = structure.NoneTensorSpec
"""The type of None in the elements of a dataset."""


class StaticOptions(collective_util.Options):
    """Options of a reduction of values that have the same static shapes on all replicas, so that these decide alike."""


class OwnOptions(StaticOptions):
    """Options of a reduction that tfdist itself adds to a step, over the replicas that take the step together."""


class WeighedOptions(OwnOptions):
    """Options of a reduction with weighted contributions; an empty share contributes zero.

    Args:
        variables: id of the variable of each reduced value, None for a value that is not a gradient; empty if no value
            is a gradient.
        weight: float64 scalar that this process's contributions must still be multiplied by; None if they are weighted
            already.
    """

    def __init__(self, variables: Sequence[str | None] = (), weight: Any = None) -> None:
        super().__init__()
        self.variables = tuple(variables)
        self.weight = weight


def is_distributed_variable(value: Any) -> bool:
    """Returns whether a value is a variable with a component on every local device."""
    return isinstance(value, values.DistributedVariable)


def enable_collectives(addresses: Sequence[str], rank: int) -> str:
    """Has this process take part in TensorFlow's collectives between processes. Initializes TensorFlow's context.

    Devices then have the names of a job ``"worker"``, of which each process sees its own only.

    Args:
        addresses: ``host:port`` of each process; TensorFlow listens at this one's port.
        rank: this process's place among them.

    Returns:
        The prefix that the names of this process's devices have.

    Raises:
        RuntimeError: TensorFlow's context is initialized already.
    """
    eager = context.context()
    job = "/job:worker/replica:0/task:"
    eager.configure_collective_ops(collective_leader=f"{job}0", device_filters=(f"{job}{rank}",))
    eager.enable_collective_ops(
        tf.train.ServerDef(
            cluster=tf.train.ClusterSpec({"worker": list(addresses)}).as_cluster_def(),
            default_session_config=eager.config,
            job_name="worker",
            task_index=rank,
            protocol="grpc",
        )
    )
    eager.ensure_initialized()
    return f"{job}{rank}"


def own_task() -> tuple[str, int]:
    """Returns the job and the number of this process's task in the names of its devices."""
    server = context.context()._collective_ops_server_def
    return ("localhost", 0) if server is None else (server.job_name, server.task_index)


def abort_collectives(why: str) -> None:
    """Ends all of TensorFlow's collectives of this process, now and later, by an error.

    Args:
        why: text of the error.
    """
    context.context().abort_collective_ops(tf.errors.ABORTED, why)


class _Number:
    """A mixin with float() and int(), which Keras calls and TensorFlow's distributed variables do not support."""

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
    """Gives a new variable a class that supports float() and int(), and returns the variable."""
    # TensorFlow's `_create_variable` takes its classes from a module-level table, which other strategies share.
    variable.__class__ = _NUMBERS.get(type(variable), type(variable))
    return variable


def copies(variable: Any) -> tuple[Any, ...]:
    """Returns the components of a variable, one on each local device."""
    return variable.values if is_distributed_variable(variable) else (variable,)


def distributed_dataset(dataset: Any, input_workers: Any, strategy: Any, context_: Any, options: Any) -> Any:
    """Returns a `tf.distribute.DistributedDataset` that counts replicas and samples of all processes in every step.

    TensorFlow divides the dataset's batches and shards the dataset according to its policy.
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
    """Combines values of the local replicas into one, as distributed iterators yield them."""
    return input_lib._create_per_replica(values_of_replicas, extended._container_strategy())


def spec_of_replicas(spec: Any, extended: Any) -> Any:
    """Returns the type of `per_replica` for values of the given type."""
    return input_lib._create_distributed_tensor_spec(extended._container_strategy(), spec)


def without_rows(spec: Any) -> Any:
    """Returns a batch of the given type, without rows."""
    return input_lib._dummy_tensor_fn(spec)


def distributed_datasets_from_function(
    function: Callable[..., Any], input_workers: Any, strategy: Any, contexts: Sequence[Any], options: Any
) -> Any:
    """Distributes the datasets that the user's function makes, one for each context; see `distributed_dataset`."""
    distributed = _DistributedDatasetsFromFunction(
        input_workers,
        strategy,
        input_contexts=list(contexts),
        dataset_fn=lambda its_context: not_tuned(function(its_context)),
        options=_read_directly(input_workers, options),
    )
    return _counting(distributed, strategy)


def _read_directly(input_workers: Any, options: Any) -> Any:
    """Returns options that make a single replica on the CPU read the dataset without a multi-device iterator.

    Making a multi-device iterator traces six functions, which takes 30 ms, and Keras makes two per epoch.
    """
    devices = [device for worker in range(input_workers.num_workers) for device in
               input_workers.compute_devices_for_worker(worker)]  # fmt: skip
    if input_workers.num_workers != len(devices) or any("CPU" not in device.upper() for device in devices):
        return options
    return _DIRECTLY


# One object for all datasets: it is part of an iterator's type, and a new type makes TensorFlow retrace functions.
_DIRECTLY = distribute_lib.InputOptions(
    experimental_fetch_to_device=False, experimental_replication_mode=InputReplicationMode.PER_REPLICA
)

_FILE_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "ArrayRecordDataset")


def reads_files(dataset: Any) -> bool:
    """Returns whether `tf.data` would shard the dataset by files, because it reads records from files."""
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
    """Yields a dataset and, recursively, its input datasets."""
    pending = [dataset]
    while pending:
        part = pending.pop()
        pending += part._inputs()
        yield part


def shard_of(part: Any) -> tuple[int, int] | None:
    """Returns the number of shards and the shard's index, if a dataset is the result of `shard`; else None."""
    return (int(part._num_shards), int(part._index)) if type(part).__name__ == "_ShardDataset" else None


def shuffles_by_chance(part: Any) -> bool:
    """Returns whether a dataset is the result of `shuffle` without a seed."""
    return "Shuffle" in type(part).__name__ and int(part._seed) == int(part._seed2) == 0


def shuffles_anew(dataset: Any) -> bool:
    """Returns whether one iteration of a dataset begins several passes, each in another order.

    All iterations of the dataset draw the orders from one generator.
    """
    return any(
        type(part).__name__ == "_RepeatDataset"
        and any(getattr(source, "_reshuffle_each_iteration", False) for source in parts_of(part))
        for part in parts_of(dataset)
    )


def local_spec(spec: Any) -> Any:
    """Returns the type of this process's first replica's value, for values of a distributed or a plain type."""
    return spec._value_specs[0] if hasattr(spec, "_value_specs") else spec


def function_of(graph: Any, name: str) -> Any:
    """Returns the function of this name that a graph calls; None if the graph has none."""
    return graph._functions.get(name)


def is_called(graph: Any, outer: Any) -> bool:
    """Returns whether an operation of ``outer`` calls a function's graph, or one of its branches or loops."""
    return any(getattr(function, "graph", None) is graph for function in outer._functions.values())


def container_of(variable: Any) -> Any:
    """Returns the distributed variable that a TensorFlow variable, or its handle, is a component of; else None."""
    container = getattr(variable, "_distributed_container", None)
    return None if container is None else container()


def not_tuned(dataset: Any) -> Any:
    """Returns the dataset without tf.data's autotuner, unless the user has set the option.

    Deleting an iterator waits for its autotuner's next run, whose period doubles from 10 ms to a minute: the autotuner
    is woken before `CancellationManager.IsCancelled` is true, and sleeps again. This could double the time of an epoch.
    Without the autotuner ``AUTOTUNE`` means as many parallel calls as there are cores, and prefetching works as before.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def generated(
    start: Callable[[], int],
    following: Callable[[tf.Tensor], Any],
    finish: Callable[[int], None],
    element_spec: Any,
) -> Any:
    """Returns a dataset like that of `tf.data.Dataset.from_generator`, whose caller makes the elements in Python.

    `from_generator` also converts and checks each component in Python, which takes as long as all else together.

    Args:
        start: function that begins an iteration, and returns its number.
        following: function that builds the graph of the next element, from the number as an int64 scalar. A
            StopIteration that a `tf.numpy_function` raises in the graph ends the iteration.
        finish: function that ends the iteration with this number, when its iterator is destroyed.
        element_spec: the type of the elements.
    """

    def init(_: tf.Tensor) -> tf.Tensor:
        number = tf.numpy_function(lambda: np.int64(start()), [], tf.int64)
        number.set_shape([])
        return number

    def end(number: tf.Tensor) -> tf.Tensor:
        def ended(number: np.ndarray) -> np.int64:
            finish(int(number))
            return np.int64(0)

        return tf.numpy_function(ended, [number], tf.int64)

    return from_generator_op._GeneratorDataset(tf.constant(0, tf.int64), init, following, end, element_spec)


_iterates_ours = ThreadValue(False)
"""Whether a thread makes an iterator of a tfdist dataset."""


class _WithoutDeviceAutotuning:
    """A mixin that disables the autotuner of the dataset that copies batches to devices, which has nothing to tune."""

    def __iter__(self) -> Any:
        with _iterates_ours.set_to(True):
            return super().__iter__()  # type: ignore[misc]


class _DistributedDataset(_WithoutDeviceAutotuning, input_lib.DistributedDataset):
    pass


class _DistributedDatasetsFromFunction(_WithoutDeviceAutotuning, input_lib.DistributedDatasetsFromFunction):
    pass


def _counting(distributed: Any, strategy: Any) -> Any:
    # An infinite dataset may hold partial batches (`batch(64).repeat()`), and a dataset made by the user's function
    # may end earlier on this process than on others, so neither may skip the count that synchronizes the processes.
    # A single replica needs no count, and keeps the static shapes of its batches.
    distributed._enable_get_next_as_optional = strategy.num_replicas_in_sync > 1
    distributed._cardinality = _UNKNOWN
    return distributed


_UNKNOWN = -2  # tf.data.UNKNOWN_CARDINALITY, as a number


def is_compiled_by_xla() -> bool:
    """Returns whether XLA compiles the graph under construction."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def captured(graph: Any, tensor: Any) -> Any:
    """Returns the tensor by which the graph of a function knows a tensor from outside."""
    return graph.capture(tensor)


def unordered(tensor: Any) -> Any:
    """Returns a stateful operation's tensor, which TensorFlow then does not order among other stateful operations.

    In functions, it runs those that use no resource, such as `tf.timestamp`, one after another, as they were traced;
    see `tfdist.engine.call_order` for those that wait for other processes.

    Args:
        tensor: a tensor that was just made.
    """
    manager = None if tf.executing_eagerly() else tensor.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(tensor.op)
    return tensor


def keeps_order(graph: Any) -> bool:
    """Returns whether the stateful operations of a graph under construction will run in their order."""
    return graph.experimental_acd_manager is not None


def is_branch_or_loop(graph: Any) -> bool:
    """Returns whether a graph is the branch of a conditional, or the condition or body of a loop."""
    return isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph)


_BACKWARD = "TfdistBackward"
"""Name under which operations have a gradient that is a Python function."""
_FUNCTIONS = "_tfdist_backward"
"""Attribute of a graph: those functions, by the names of the operations."""


def with_gradient(
    outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], backward: Callable[..., list[Any]]
) -> list[tf.Tensor]:
    """Gives tensors a gradient that is a Python function, also for a tape around the function under construction.

    Unlike `tf.custom_gradient` it takes and returns `tf.IndexedSlices`, and nothing outlives the graph.

    Args:
        outputs: the tensors; what they were computed by is not recorded.
        inputs: tensors that they are a function of.
        backward: returns the gradients by the inputs for those by the outputs.

    Returns:
        The outputs, with the gradient.
    """
    given = [*outputs, *inputs]
    if tf.executing_eagerly():
        made = list(outputs)
    else:
        graph = tf.compat.v1.get_default_graph()
        with record.stop_recording(), graph.gradient_override_map({"IdentityN": _BACKWARD}):
            named = tf.identity_n(given)
        made = named[: len(outputs)]
        functions = getattr(graph, _FUNCTIONS, {})
        setattr(graph, _FUNCTIONS, functions)
        functions[named[0].op.name] = lambda *gradients: [None] * len(outputs) + backward(*gradients[: len(outputs)])
    record.record_operation("tfdist_backward", made, list(inputs), backward)
    return made


@tf.RegisterGradient(_BACKWARD)
def _backward(operation: Any, *gradients: Any) -> Any:
    return getattr(operation.graph, _FUNCTIONS)[operation.name](*gradients)


def replace_gradient_function(seam: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the function by which tapes make the gradient of an operation.

    Args:
        seam: function that makes the replacement from the original, whose last argument is the name scope of the
            forward pass.
    """
    pywrap_tfe.TFE_Py_RegisterGradientFunction(seam(backprop._gradient_function))


def replace_recording(seam: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the function by which tapes record a gradient that is a Python function.

    Args:
        seam: function that makes the replacement from the original ``record_operation``.
    """
    record.record_operation = seam(record.record_operation)


def is_iterating_ours() -> bool:
    """Returns whether this thread is making an iterator of a dataset that tfdist has distributed."""
    return _iterates_ours.value


def global_seed() -> int | None:
    """Returns the seed set by `tf.random.set_seed`, or None."""
    return context.global_seed()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context that gives new operations the seed, and restores TensorFlow's generators on exit."""
    state = context.context()
    kept = state._seed, state._rng
    state._seed, state._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        state._seed, state._rng = kept
