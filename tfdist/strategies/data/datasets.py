"""Distribution of datasets over the replicas of all processes."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.private import datasets as private_datasets
from tfdist.strategies.data.row_checks import equal_rows
from tfdist.strategies.data.shares import Share, ShareWithOwnLogs, as_share, batch_size
from tfdist.strategies.step_calls import StepCalls
from tfdist.tensors import HOST

log = logging.getLogger("tfdist")


def is_cut_by_samples(dataset: tf.data.Dataset, processes: int) -> bool:
    """Returns whether every process reads the whole dataset and takes its share of each batch.

    Otherwise `tf.data` shards the dataset by files, or every process is assumed to provide its own samples.

    Args:
        dataset: a dataset whose options have the user's `tf.data.experimental.AutoShardPolicy`.
        processes: number of processes.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    is_auto = policy == policies.AUTO
    return policy == policies.DATA or (is_auto and not private_datasets.can_be_sharded(dataset, processes))


_strategies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By id, the `extended` of each strategy. Iterator types hold the id, because a type spec consists of plain values."""


class SharedDataset(tf.distribute.DistributedDataset):
    """A dataset of global batches, of which every replica gets its share: contiguous rows, in the order of replicas.

    Batches are cut in the step's graph, after reading: a `map` on the dataset would be optimized again for each
    iterator, which takes longer than a short epoch. Rows are copied: a batch from a generator may share memory with
    the user's array, and TensorFlow's kernels may write into a slice of it.

    Args:
        dataset: a dataset of global batches.
        extended: the strategy's `extended`.
        calls: collectives of the Keras steps that read the dataset. The steps get a `Share`, in which the batch's first
            row stands in if the share is empty. None if the dataset is read outside of Keras steps.

    Attributes:
        dataset: the dataset of global batches.

    Raises:
        ValueError: the dataset's elements are not batches.
    """

    def __init__(self, dataset: tf.data.Dataset, extended: Any, calls: StepCalls | None) -> None:
        if not any(_has_rows(spec) for spec in tf.nest.flatten(dataset.element_spec)):
            raise ValueError(
                "the elements of the dataset must be batches, to be cut into shares for "
                f"{extended._num_replicas_in_sync} replicas; got elements of {dataset.element_spec}. Call `batch()` "
                "on the dataset."
            )
        self.dataset = dataset
        self._dataset = _read_ahead(private_datasets.not_tuned(dataset))
        _strategies[id(extended)] = extended
        self._spec = _SharedIteratorSpec(dataset.element_spec, id(extended), calls)

    def __iter__(self) -> SharedIterator:
        return self._spec._from_components(iter(self._dataset))

    @property
    def element_spec(self) -> Any:
        """The type of each step's value for all local replicas."""
        return self._spec.of_shares()

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Reduces the shares of all steps to one state; see `tf.distribute.DistributedDataset`.

        AutoGraph calls it for a loop over the dataset in a `tf.function`.
        """
        iterator = iter(self)

        def step(shares: tf.experimental.Optional, state: Any) -> Any:
            state = reduce_func(state, shares.get_value())
            return iterator.get_next_as_optional(), state

        _, state = tf.while_loop(
            lambda shares, _: shares.has_value(),
            step,
            [iterator.get_next_as_optional(), initial_state],
            parallel_iterations=1,
        )
        return state


def _read_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset, read ahead of the steps if this process has another core for that: it reads whole batches.

    On one core, changing between two threads takes longer than that saves. A pass that begins while steps run would be
    drawn before or after what else reads the dataset, such as a validation, by chance: in another order on some
    processes.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return dataset if cores == 1 or private_datasets.shuffles_anew(dataset) else dataset.prefetch(1)


class SharedIterator(tf.distribute.DistributedIterator, tf.__internal__.CompositeTensor):
    """An iterator of a `SharedDataset`, which may be an argument of a `tf.function`."""

    def __init__(self, iterator: Any, spec: _SharedIteratorSpec) -> None:
        self._iterator = iterator
        self._spec = spec

    @property
    def _type_spec(self) -> _SharedIteratorSpec:
        return self._spec

    @property
    def element_spec(self) -> Any:
        """The type of each step's value for all local replicas."""
        return self._spec.of_shares()

    @property
    def merges_logs(self) -> bool:
        """Whether the logs of each step that reads this iterator are those of all processes."""
        return self._spec.calls.merges_logs

    def __iter__(self) -> SharedIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Any:
        """Returns the next step's shares; raises `tf.errors.OutOfRangeError` when no process has another batch."""
        if not self._spec.calls.counts_batches:
            return self._of_equal_batches(self._iterator.get_next())
        shares, another = self._shares()

        def end() -> Any:
            self._iterator.get_next()  # raises the error
            return [self._spec.share_without_rows() for _ in self._spec.extended().worker_devices]

        return private_datasets.per_replica(tf.cond(another, shares, end), self._spec.extended())

    def get_next_as_optional(self) -> Any:
        """Returns the next step's shares, as a `tf.experimental.Optional`."""
        some, none = tf.experimental.Optional.from_value, tf.experimental.Optional.empty
        if not self._spec.calls.counts_batches:
            optional = self._iterator.get_next_as_optional()
            return tf.cond(
                optional.has_value(),
                lambda: some(self._of_equal_batches(optional.get_value())),
                lambda: none(self.element_spec),
            )
        shares, another = self._shares()
        return tf.cond(
            another,
            lambda: some(private_datasets.per_replica(shares(), self._spec.extended())),
            lambda: none(self.element_spec),
        )

    def _of_equal_batches(self, batch: Any) -> Any:
        """Returns the local replicas' shares of a batch, where all processes have batches of equal size."""
        extended = self._spec.extended()
        samples = batch_size(batch)
        parts = self._parts(samples)
        in_step = samples if extended.synchronizes_steps else parts[-1] - parts[0]
        before = [*equal_rows(batch, tf.constant(True)), extended.shares.set_total(in_step)]
        if self._spec.calls.compares_samples:
            before.append(extended.shares.tally(samples))
        with tf.control_dependencies(before):
            samples = tf.identity(samples)
        return private_datasets.per_replica(self._cut(batch, samples, parts), extended)

    def _shares(self) -> tuple[Callable[[], list[Any]], tf.Tensor]:
        """Returns a function that makes the local replicas' shares, and whether any process has another batch."""
        extended, spec = self._spec.extended(), self._spec
        devices = len(extended.worker_devices)
        optional = self._iterator.get_next_as_optional()
        is_there = optional.has_value()
        # If this process has no batch but another one has, a row of zeros stands in.
        batch = tf.cond(is_there, optional.get_value, lambda: as_share(private_datasets.without_rows(spec.batch)).data)
        rows = batch_size(batch)
        with tf.control_dependencies(equal_rows(batch, is_there)):
            samples = tf.where(is_there, rows, 0)
        parts = self._parts(samples)
        another = extended.count_step(tf.cast(is_there, tf.int64) * devices, parts[-1] - parts[0])

        return lambda: self._cut(batch, rows, parts), another > 0

    def _parts(self, samples: tf.Tensor) -> list[tf.Tensor]:
        """Returns the first row of each local replica's share of so many samples, and the row after the last share."""
        extended = self._spec.extended()
        devices, replicas = len(extended.worker_devices), extended._num_replicas_in_sync
        return _parts(samples, extended._get_replica_id_in_sync_group(0), devices, replicas)

    def _cut(self, batch: Any, rows: tf.Tensor, parts: list[tf.Tensor]) -> list[Any]:
        """Cuts a batch with the given number of rows into the local replicas' shares."""
        spec, shared = self._spec, []
        for device, begin, end in zip(spec.extended().worker_devices, parts, parts[1:], strict=False):
            with tf.device(HOST), tf.name_scope("tfdist_share"):  # only the share crosses to the device
                share = _share(batch, rows, begin, end, spec.stand_in)
            with tf.device(device):
                part = tf.nest.map_structure(tf.identity, share.data, expand_composites=True)
            shared.append(spec.kind(part, share.rows) if spec.stand_in else part)
        return shared


class _SharedIteratorSpec(tf.TypeSpec):
    """The type of a `SharedIterator`.

    Args:
        batch: the type of the dataset's elements.
        strategy: the id of the strategy's `extended`.
        calls: collectives of the Keras steps that read the iterator; None outside of Keras steps.
    """

    __slots__ = ("_strategy", "batch", "calls", "stand_in")

    def __init__(self, batch: Any, strategy: int, calls: StepCalls | None) -> None:
        self.batch = batch
        self.stand_in = calls is not None
        self.calls = StepCalls(*calls or ())
        self._strategy = strategy

    def extended(self) -> Any:
        """Returns the strategy's `extended`."""
        return _strategies[self._strategy]

    @property
    def kind(self) -> type[Share]:
        """The type of shares that Keras steps get."""
        return Share if self.calls.merges_logs else ShareWithOwnLogs

    def share_without_rows(self) -> Any:
        """Returns a share without rows, for a branch of a conditional that raises an error instead of returning one."""
        empty = private_datasets.without_rows(self.batch)
        return self.kind(empty, tf.constant(0, tf.int64)) if self.stand_in else empty

    def of_shares(self) -> Any:
        """Returns the type of each step's value for all local replicas."""
        share = tf.nest.map_structure(_of_any_rows, self.batch)
        if self.stand_in:
            share = self.kind(share, tf.TensorSpec([], tf.int64))
        return private_datasets.spec_of_replicas(share, self.extended())

    @property
    def value_type(self) -> type:
        return SharedIterator

    def _serialize(self) -> Any:
        return self.batch, self._strategy, tuple(self.calls) if self.stand_in else None

    @property
    def _component_specs(self) -> Any:
        return tf.data.IteratorSpec(self.batch)

    def _to_components(self, value: SharedIterator) -> Any:
        return value._iterator

    def _from_components(self, components: Any) -> SharedIterator:
        return SharedIterator(components, self)


def _share(batch: Any, held: tf.Tensor, begin: tf.Tensor, end: tf.Tensor, stand_in: bool) -> Share:
    """Returns the rows from ``begin`` to ``end`` of a batch with ``held`` rows; with ``stand_in``, at least one row."""
    rows = end - begin
    if stand_in:
        is_filled = rows > 0
        begin, end = tf.where(is_filled, begin, 0), tf.where(is_filled, end, tf.minimum(held, 1))
    chosen = tf.range(begin, end)
    part = tf.nest.map_structure(lambda component: _rows(component, chosen, begin, end), batch)
    return Share(part, rows)


def _parts(samples: tf.Tensor, first: int, devices: int, replicas: int) -> list[tf.Tensor]:
    """Returns the first row of each local replica's share, and the row after the last local share.

    If samples do not divide evenly, the replicas with the lowest ids have one more.
    """
    each, more = samples // replicas, samples % replicas
    return [each * replica + tf.minimum(more, replica) for replica in range(first, first + devices + 1)]


def _has_rows(spec: Any) -> bool:
    return isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)) and spec.shape.rank != 0


def _of_any_rows(spec: Any) -> Any:
    """Returns the type of a component after cutting: its number of rows is unknown."""
    if not _has_rows(spec) or spec.shape.rank is None:
        return spec
    shape = tf.TensorShape([None]).concatenate(spec.shape[1:])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _rows(component: Any, chosen: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> Any:
    """Returns the rows of a component from ``begin`` to ``end``, whose numbers are ``chosen``."""
    if isinstance(component, tf.SparseTensor):
        rest = component.dense_shape[1:]
        return tf.sparse.slice(
            component, tf.concat([[begin], tf.zeros_like(rest)], 0), tf.concat([[end - begin], rest], 0)
        )
    if isinstance(component, tf.RaggedTensor) or (isinstance(component, tf.Tensor) and component.shape.rank != 0):
        return tf.gather(component, chosen)
    return component


def warn_of_own_shards(dataset: tf.data.Dataset, processes: int, rank: int) -> None:
    """Warns if a dataset is this process's shard already: its batches would be divided among all processes once more.

    Args:
        dataset: the dataset that is being distributed.
        processes: number of processes.
        rank: rank of this process.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == tf.data.experimental.AutoShardPolicy.OFF:
        return
    if any(private_datasets.shard_of(part) == (processes, rank) for part in private_datasets.parts_of(dataset)):
        log.warning(
            "tfdist: this dataset has been sharded for %d processes, and each process takes only its share of each "
            "batch of its shard: many samples are never trained on. Leave out `shard`; or return the sharded dataset "
            "from the function given to strategy.distribute_datasets_from_function, which does not divide batches.",
            processes,
        )


def warn_of_own_samples(dataset: tf.data.Dataset) -> None:
    """Warns if a dataset has samples of this process's own, where all processes are to read the same."""
    if dataset.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF:
        log.warning(
            "tfdist: processes share the work of `predict` on one dataset, and each computes its part of each batch. "
            "AutoShardPolicy.OFF says that this one has samples of each process's own: most of them would not be "
            "predicted. Give all processes the same dataset, or pass each process's batches to `predict_on_batch`."
        )


def warn_of_unseeded_shuffle(dataset: tf.data.Dataset) -> None:
    """Warns if a dataset is shuffled without a seed: processes would see some samples twice and others never."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == tf.data.experimental.AutoShardPolicy.OFF:
        return
    if any(private_datasets.shuffles_by_chance(part) for part in private_datasets.parts_of(dataset)):
        log.warning(
            "tfdist: this dataset is shuffled without a seed, so every process shuffles it differently, and some "
            "samples are seen twice, others never. Pass seed= to shuffle(), or call "
            "keras.utils.set_random_seed() with the same number on every process before building it."
        )
