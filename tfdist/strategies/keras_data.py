"""How Keras reads data under a strategy: models are built without drawing a batch, and all processes shuffle alike."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import trainer as trainer_module
from keras.src.trainers.data_adapters import py_dataset_adapter

from tfdist.strategies import at_work
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.extended import AllReduceExtended


def install(replace: Callable[..., None]) -> None:
    """Puts the seams of data in place.

    Args:
        replace: puts one function in the place of another.
    """
    replace(trainer_module.TensorFlowTrainer, "_maybe_symbolic_build", _built_from_the_spec)
    replace(trainer_module.TFEpochIterator, "__init__", _shuffled_alike)
    py_dataset_adapter.random = _AgreedShuffle()


def forget_the_order() -> None:
    """Datasets that are not of a strategy are shuffled in their own way again."""
    py_dataset_adapter.random.release()


def _built_from_the_spec(original: Callable[..., Any]) -> Callable[..., Any]:
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if at_work.of_model(self) is None or iterator is None:
            return original(self, iterator=iterator, data_batch=data_batch)
        spec = iterator._distributed_dataset.element_spec
        parts = tree.flatten(tree.map_structure(_batch_of_one, spec))
        if all(part is not None for part in parts):
            # Without drawing a batch: a generator would not yield it again.
            return original(self, data_batch=tree.map_structure(_batch_of_one, spec))
        for _, _, batches in iterator:
            local = tree.map_structure(
                lambda part: part.values[0] if isinstance(part, private.DistributedValues) else part, next(batches)
            )
            return original(self, data_batch=tree.map_structure(_with_a_sample, local))
        return None

    return _maybe_symbolic_build


def _batch_of_one(spec: Any) -> tf.Tensor | None:
    """A sample like those that a dataset holds; None where its spec does not tell the shape."""
    spec = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None or None in spec.shape[1:]:
        return None
    shape = [1, *spec.shape[1:]] if spec.shape.rank else []
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)


def _with_a_sample(part: Any) -> Any:
    """A process without samples in the first step builds its model from the shape of one."""
    if not isinstance(part, tf.Tensor) or part.shape.rank == 0 or part.shape[0] != 0:
        return part
    return tf.zeros([1, *part.shape[1:]], part.dtype)


def _shuffled_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        extended = at_work.of_strategy(distribute_strategy)
        if extended is None:
            original(self, distribute_strategy, *args, **kwargs)
            return
        with _shuffling_alike(extended):
            original(self, distribute_strategy, *args, **kwargs)

    return __init__


@contextlib.contextmanager
def _shuffling_alike(extended: AllReduceExtended) -> Iterator[None]:
    """Datasets that Keras makes inside are shuffled in the chief's way on every process."""
    own = private.global_seed()
    state = np.array([own is not None, own or 0, random.SystemRandom().getrandbits(31)], np.int64)
    agreed = extended.exchange.broadcast_once(
        tf.constant(state), "the seed that data is shuffled with", "int64 (3,)"
    ).numpy()
    py_dataset_adapter.random.seed(int(agreed[1] if agreed[0] else agreed[2]))
    if agreed[0]:
        with private.seeded(int(agreed[1])):
            yield
        return
    # No seed was set. A seeded operation would repeat one order in every epoch, so draw the orders on the host.
    generator = np.random.default_rng(int(agreed[2]))
    original = tf.random.shuffle

    def shuffle(value: tf.Tensor, seed: int | None = None, name: str | None = None) -> tf.Tensor:
        if seed is not None:
            return original(value, seed, name)
        shuffled = tf.numpy_function(generator.permutation, [value], value.dtype)
        shuffled.set_shape(value.shape)
        return shuffled

    tf.random.shuffle = shuffle
    try:
        yield
    finally:
        tf.random.shuffle = original


class _AgreedShuffle:
    """Stands in for the module `random` where Keras shuffles the order of a `PyDataset`."""

    def __init__(self) -> None:
        self._generator: Any = random

    def seed(self, seed: int) -> None:
        self._generator = random.Random(seed)

    def release(self) -> None:
        self._generator = random

    def shuffle(self, items: list[Any]) -> None:
        self._generator.shuffle(items)
