"""TensorFlow's distributed datasets and their iterators, and what `tf.data` says of a dataset nowhere public."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.private.tensorflow import (
    InputReplicationMode,
    distribute_lib,
    from_generator_op,
    input_lib,
    structure,
)
from tfdist.thread_values import ThreadValue

NoneSpec = structure.NoneTensorSpec
"""The type of None in the elements of a dataset."""


def distributed_dataset(dataset: Any, input_workers: Any, strategy: Any, context_: Any, options: Any) -> Any:
    """Returns a `tf.distribute.DistributedDataset` that counts replicas and samples of all processes in every step.

    TensorFlow divides the dataset's batches and shards the dataset according to its policy.
    """
    distributed = ShardsOfDataset(
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
    distributed = DatasetsOfFunction(
        input_workers,
        strategy,
        input_contexts=list(contexts),
        dataset_fn=lambda its_context: not_tuned(function(its_context)),
        options=_read_directly(input_workers, options),
    )
    lengths = [int(input_lib._cardinality(dataset)) for dataset in distributed._datasets]
    distributed.own_batches = max(lengths) if min(lengths) >= 0 else _UNKNOWN
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


_OF_ALL_RECORDS = (
    "CacheDataset", "_ConcatenateDataset", "_ScanDataset", "_ShardDataset", "_SkipDataset", "_SnapshotDataset",
    "_TakeDataset", "_TakeWhileDataset", "_UniqueDataset", "_WindowDataset", "_ZipDataset",
)  # fmt: skip
"""Datasets that yield other elements from a shard of their input than they do from all of it, or keep what they read
of a shard for who reads all."""


def can_be_sharded(dataset: Any, shards: int) -> bool:
    """Returns whether a dataset reads records from files, and has, for shards of them, shards of its elements.

    It has not where something is taken from all records, such as the first ones, where they are joined with others, or
    where there are fewer files than shards, as far as their number is known.
    """
    parts = list(parts_of(dataset))
    reads: dict[int, bool] = {}
    for part in reversed(parts):  # inputs come before what reads them
        of_inputs = [reads[id(source)] for source in part._inputs()]
        is_reader = _reads_records(part)
        reads[id(part)] = is_reader or any(of_inputs)
        takes_all = type(part).__name__ in _OF_ALL_RECORDS or not all(of_inputs)
        if (any(of_inputs) and takes_all) or (is_reader and 0 <= _number_of_files(part) < shards):
            return False
    return reads[id(dataset)]


def _number_of_files(part: Any) -> int:
    """Returns how many files a part of a dataset reads; negative if that is not known."""
    names = getattr(part, "_filenames", None)
    sources = [names] if isinstance(names, tf.data.Dataset) else part._inputs()
    return min((int(source.cardinality()) for source in sources), default=_UNKNOWN)


def _reads_records(part: Any) -> bool:
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


_UNKNOWN = -2  # tf.data.UNKNOWN_CARDINALITY, as a number

_iterates_ours = ThreadValue(False)
"""Whether a thread makes an iterator of a tfdist dataset."""


class _WithoutDeviceAutotuning:
    """A mixin that disables the autotuner of the dataset that copies batches to devices, which has nothing to tune."""

    def __iter__(self) -> Any:
        with _iterates_ours.set_to(True):
            return super().__iter__()  # type: ignore[misc]


class ShardsOfDataset(_WithoutDeviceAutotuning, input_lib.DistributedDataset):
    """A dataset of which each process reads its shard: of how many batches, nobody knows."""


class DatasetsOfFunction(_WithoutDeviceAutotuning, input_lib.DistributedDatasetsFromFunction):
    """Datasets that each process has made by a function of the user.

    Attributes:
        own_batches: number of batches of this process; negative if it is infinite or unknown.
        batches: number of batches of an epoch, likewise, when processes have agreed on it.
    """

    own_batches = batches = _UNKNOWN

    @property
    def cardinality(self) -> int:
        """The number of batches of an epoch, for Keras: without it, a step finds at its end that there are none."""
        return self.batches


def _counting(distributed: Any, strategy: Any) -> Any:
    # An infinite dataset may hold partial batches (`batch(64).repeat()`), and a dataset made by the user's function
    # may end earlier on this process than on others, so neither may skip the count that synchronizes the processes.
    # A single replica needs no count, and keeps the static shapes of its batches.
    distributed._enable_get_next_as_optional = strategy.num_replicas_in_sync > 1
    distributed._cardinality = _UNKNOWN
    return distributed


def is_iterating_ours() -> bool:
    """Returns whether this thread is making an iterator of a dataset that tfdist has distributed."""
    return _iterates_ours.value
