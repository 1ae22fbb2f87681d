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
import functools
import random
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
    input_util,
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
    "GradientOptions",
    "InputContext",
    "InputReplicationMode",
    "Mirrored",
    "MirroredExtended",
    "PerReplica",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ValueContext",
    "concat_slices",
    "count_replicas_with",
    "distributed_dataset",
    "distributed_datasets_from_function",
    "global_seed",
    "is_distributed_variable",
    "is_mirrored",
    "local_replica_id",
    "regroup",
    "seeded",
    "select_replica",
    "simple_broadcast",
]

CrossDeviceOps = cross_device_ops.CrossDeviceOps
ReductionToOneDevice = cross_device_ops.ReductionToOneDevice
simple_broadcast = cross_device_ops.simple_broadcast
concat_slices = cross_device_utils.aggregate_tensors_or_indexed_slices
InputContext = distribute_lib.InputContext
InputReplicationMode = distribute_lib.InputReplicationMode
ValueContext = distribute_lib.ValueContext
ReplicaContext = distribute_lib.ReplicaContext
regroup = distribute_utils.regroup
select_replica = distribute_utils.select_replica
is_mirrored = distribute_utils.is_mirrored
MirroredExtended = mirrored_strategy.MirroredExtended
DistributedValues = values.DistributedValues
Mirrored = values.Mirrored
PerReplica = values.PerReplica
CheckpointInitialValue = trackable.CheckpointInitialValue
local_replica_id = values_util.get_current_replica_id_as_int


class GradientOptions(collective_util.Options):
    """Options of a reduction of gradients, which say whose they are.

    Args:
        variables: the gradients' variables, by their ids, in the gradients' order.
    """

    def __init__(self, variables: Sequence[str]) -> None:
        super().__init__()
        self.variables = tuple(variables)


def is_distributed_variable(value: Any) -> bool:
    """Whether a value is a variable with a component on every local device."""
    return isinstance(value, values.DistributedVariable)


def distributed_dataset(dataset: Any, input_workers: Any, strategy: Any, context_: Any, options: Any) -> Any:
    """A `tf.distribute.DistributedDataset` whose every step counts replicas and samples over all processes."""
    distributed = input_util.get_distributed_dataset(
        _not_tuned(dataset),
        input_workers,
        strategy,
        num_replicas_in_sync=context_.num_replicas_in_sync,
        input_context=context_,
        options=options,
    )
    return _always_counting(distributed)


def distributed_datasets_from_function(
    function: Callable[..., Any], input_workers: Any, strategy: Any, context_: Any, options: Any
) -> Any:
    """As `distributed_dataset`, of the dataset that the user's function makes for this process."""
    distributed = input_util.get_distributed_datasets_from_function(
        lambda its_context: _not_tuned(function(its_context)), input_workers, [context_], strategy, options
    )
    return _always_counting(distributed)


def _not_tuned(dataset: Any) -> Any:
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


def _brought_without_tuning() -> None:
    """Puts a seam on what brings batches to the devices: it has a tuner of its own, with nothing to tune."""
    original = multi_device_iterator_ops._create_device_dataset

    @functools.wraps(original)
    def create_device_dataset(*args: Any, **kwargs: Any) -> Any:
        return _not_tuned(original(*args, **kwargs))

    multi_device_iterator_ops._create_device_dataset = create_device_dataset


_brought_without_tuning()


def _always_counting(distributed: Any) -> Any:
    # An infinite dataset may hold partial batches (`batch(64).repeat()`), and a dataset that the user's function
    # made may end earlier on this process than on others: neither may skip the count that keeps all in step.
    distributed._enable_get_next_as_optional = True
    distributed._cardinality = _UNKNOWN
    return distributed


_UNKNOWN = -2  # tf.data.UNKNOWN_CARDINALITY, as a number

_counters: dict[type, Callable[..., Any]] = {}
_original_count = input_lib._calculate_replicas_with_values


def count_replicas_with(strategy_type: type, counter: Callable[[Any, list[Any]], Any]) -> None:
    """Lets a strategy count the replicas that have data itself.

    Args:
        strategy_type: of strategies that bring their own count.
        counter: called with the strategy and the optionals of its local replicas; returns the number of replicas
            that have a value, over all processes, as an int64 scalar.
    """
    _counters[strategy_type] = counter
    input_lib._calculate_replicas_with_values = _count


def _count(strategy: Any, input_workers: Any, optional_list: list[list[Any]]) -> Any:
    counter = next((_counters[kind] for kind in type(strategy).__mro__ if kind in _counters), None)
    if counter is None:
        return _original_count(strategy, input_workers, optional_list)
    return counter(strategy, [optional for optionals in optional_list for optional in optionals])


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
