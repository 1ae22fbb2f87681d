"""Every private module of TensorFlow that tfdist uses, imported here and nowhere else.

Checked on TensorFlow 2.18 and 2.21. tfdist relies on the following, which may change between versions:

- ``mirrored_strategy.MirroredExtended`` runs replicas on one process's devices and leaves ``_cross_device_ops``,
  the dataset methods, ``_reduce_to`` and the replica ids to be overridden.
- ``input_lib._calculate_replicas_with_values`` is called once per step of a distributed iterator, with the
  optionals of all local replicas; its result decides, equally on all processes, whether there is another step.
- ``from_generator_op._GeneratorDataset`` makes elements by calling a function until that raises ``OutOfRangeError``.
- ``multi_device_iterator_ops._create_device_dataset`` makes the dataset that copies batches to one device.
- ``ops.EagerTensor`` makes a tensor of an array, of which TensorFlow 2.18 shares the memory if it is aligned.
- ``Context.call_function`` calls a function that is known by its name, which it is as long as the function lives.
- ``Graph.experimental_acd_manager`` orders the stateful operations of a function, and leaves out those it is told to.
"""

from __future__ import annotations

import contextlib
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
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs, resource_variable_ops
from tensorflow.python.trackable import base as trackable

__all__ = [
    "CheckpointInitialValue",
    "CrossDeviceOps",
    "DistributedValues",
    "InputContext",
    "InputReplicationMode",
    "InputWorkers",
    "Mirrored",
    "MirroredExtended",
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
    "backprop",
    "call_of",
    "concat_slices",
    "container_of",
    "control_flow_util",
    "control_flow_v2_func_graphs",
    "copies",
    "distribute_lib",
    "distribute_utils",
    "enable_collectives",
    "from_generator_op",
    "get_devices_from",
    "global_seed",
    "input_lib",
    "is_distributed_variable",
    "is_mirrored",
    "local_replica_id",
    "multi_device_iterator_ops",
    "new_variable",
    "own_task",
    "pywrap_tfe",
    "record",
    "regroup",
    "seeded",
    "select_replica",
    "simple_broadcast",
    "stop_recording",
    "structure",
    "tensor_of",
    "values",
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
HOST = "/device:CPU:0"

local_replica_id = values_util.get_current_replica_id_as_int


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


def container_of(variable: Any) -> Any:
    """Returns the distributed variable that a TensorFlow variable, or its handle, is a component of; else None."""
    container = getattr(variable, "_distributed_container", None)
    return None if container is None else container()


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


def tensor_of(array: np.ndarray) -> tf.Tensor:
    """Returns a tensor with a copy of an array's elements, on the host, in a fifth of the time of `tf.constant`.

    Args:
        array: an array of a dtype that TensorFlow has, or of characters; not of Python objects.
    """
    context.ensure_initialized()
    return ops.EagerTensor(array.copy(), HOST, None)


def call_of(function: Any) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
    """Returns a quick call of a graph, without gradients, and without checks of what is passed in Python.

    Args:
        function: a concrete function of tensors, which returns tensors.

    Returns:
        Function of the list of eager tensors, which returns the list of results.
    """
    graph, captured = function.inference_fn, list(function.captured_inputs)  # TensorFlow knows the graph while it lives
    results, call = len(graph.function_type.flat_outputs), context.context().call_function

    def called(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return call(graph.name, [*tensors, *captured], results)

    return called
