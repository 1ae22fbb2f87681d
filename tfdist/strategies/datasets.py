"""How a dataset is dealt out to the replicas of all processes."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.shares import Share, batch_size

log = logging.getLogger("tfdist")


def is_cut_by_samples(dataset: tf.data.Dataset) -> bool:
    """Whether every process reads the dataset, and takes its share of each batch.

    Otherwise `tf.data` deals out the files that are read, or every process is trusted to bring its own samples.

    Args:
        dataset: with the user's `tf.data.experimental.AutoShardPolicy`.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    return policy == policies.DATA or (policy == policies.AUTO and not private.reads_files(dataset))


def cut(dataset: tf.data.Dataset, first: int, devices: int, replicas: int, stand_in: bool) -> tf.data.Dataset:
    """Cuts every batch into contiguous shares, and keeps those of this process's replicas, one after the other.

    Rows are copied. A batch that a generator has yielded may lie in the user's own array, and TensorFlow's kernels
    take a slice of it for memory that they may write to.

    Args:
        dataset: of global batches.
        first: this process's first replica.
        devices: how many replicas this process has.
        replicas: how many there are in all.
        stand_in: whether to yield a `Share`, in which the batch's first row stands in for samples where there are none.

    Raises:
        ValueError: the dataset's elements are no batches.
    """
    if not any(_has_rows(spec) for spec in tf.nest.flatten(dataset.element_spec)):
        raise ValueError(
            f"the elements of the dataset must be batches, to be cut into shares for {replicas} replicas; got elements "
            f"of {dataset.element_spec}. Call `batch` on the dataset."
        )

    def share(batch: Any, replica: Any) -> Any:
        samples = batch_size(batch)
        begin, end = _part(samples, replica, replicas), _part(samples, replica + 1, replicas)
        if not stand_in:
            return tf.nest.map_structure(lambda component: _rows(component, begin, end), batch)
        own = end - begin
        begin, end = tf.where(own > 0, begin, 0), tf.where(own > 0, end, tf.minimum(samples, 1))
        return Share(tf.nest.map_structure(lambda component: _rows(component, begin, end), batch), own)

    # tf.data passes the parts of a tuple one by one, and anything else whole.
    is_tuple = type(dataset.element_spec) is tuple
    if devices == 1:
        return dataset.map(lambda *batch: share(batch if is_tuple else batch[0], first)).prefetch(1)

    def shares(*batch: Any) -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(first, first + devices)
        return numbers.map(lambda replica: share(batch if is_tuple else batch[0], replica))

    return dataset.flat_map(shares).prefetch(devices)


def _part(samples: tf.Tensor, replica: Any, replicas: int) -> tf.Tensor:
    """Where a replica's share of some samples begins; the first replicas have one more where they do not divide."""
    replica = tf.cast(replica, tf.int64)
    return replica * (samples // replicas) + tf.minimum(replica, samples % replicas)


def _has_rows(spec: Any) -> bool:
    shape = getattr(spec, "shape", None)
    return isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)) and shape.rank != 0


def _rows(component: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    if isinstance(component, tf.SparseTensor):
        rest = component.dense_shape[1:]
        return tf.sparse.slice(
            component, tf.concat([[begin], tf.zeros_like(rest)], 0), tf.concat([[end - begin], rest], 0)
        )
    if isinstance(component, tf.RaggedTensor) or (isinstance(component, tf.Tensor) and component.shape.rank != 0):
        return tf.gather(component, tf.range(begin, end))
    return component


def warn_of_unseeded_shuffle(dataset: tf.data.Dataset) -> None:
    """Processes that shuffle one dataset differently see some samples twice and others never."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == tf.data.experimental.AutoShardPolicy.OFF:
        return
    if any(
        "Shuffle" in type(part).__name__ and int(part._seed) == int(part._seed2) == 0
        for part in private.parts_of(dataset)
    ):
        log.warning(
            "tfdist: this dataset is shuffled without a seed, so every process shuffles it in its own way and "
            "some samples are seen twice, others never. Pass seed= to shuffle(), or call "
            "keras.utils.set_random_seed() with the same number on every process before you build it."
        )
