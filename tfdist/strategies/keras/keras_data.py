"""Data of Keras under a strategy: models are built without drawing a batch, and all processes shuffle equally."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.private import tensorflow as private
from tfdist.private.epochs import spec_of
from tfdist.private.keras import py_dataset_adapter, tf_trainer, tree
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.abilities import Ability, DataParallel
from tfdist.strategies.data.datasets import SharedDataset
from tfdist.strategies.data.row_checks import rows_of_model
from tfdist.strategies.data.shares import Share, as_share
from tfdist.strategies.keras import keras_step_calls
from tfdist.strategies.keras.keras_variables import check_scope


def install() -> None:
    """Installs the seams for data."""
    keras_hooks.add(BuiltFromTheSpec)
    replace(tf_trainer.TFEpochIterator, "__init__", _shuffled_alike)
    replace(py_dataset_adapter.PyDatasetAdapter, "_finite_generator", _in_its_order)
    replace(py_dataset_adapter.OrderedEnqueuer, "_run", _run_in_its_order)
    py_dataset_adapter.random = _random


class BuiltFromTheSpec(keras_hooks.ModelHooks[Ability]):
    """The hook that builds models without drawing a batch, where the data's spec contains the shapes."""

    def symbolic_build(self, call: TrainerCall) -> None:
        """Builds a model that has a `call` from a placeholder; with a custom `train_step` this may fail silently.

        Raises:
            ValueError: the model has state that was made outside the scope.
        """
        if isinstance(self.extended, DataParallel):
            check_scope(call.model)
        call.replace(lambda: self._build(call))

    def _build(self, call: TrainerCall) -> None:
        model, iterator = call.model, call.arguments["iterator"]
        if type(model).call is keras.Model.call:
            return
        try:
            if iterator is not None:
                call.arguments.update(iterator=None, data_batch=_placeholder(model, iterator))
            call.inner()
        except (RuntimeError, ValueError):  # a custom step may call the model differently, or not at all
            if type(model).train_step is tf_trainer.TensorFlowTrainer.train_step:
                raise


def _placeholder(model: Any, iterator: Any) -> Any:
    """Returns a placeholder like an iterator's batches; the first batch itself if the spec does not have its shapes."""
    spec = spec_of(iterator)
    spec = spec.data if isinstance(spec, Share) else spec
    rows = rows_of_model(model) or 1
    batch = tree.map_structure(lambda part: _some_rows(part, rows), spec)
    if any(part is None for part in tree.flatten(batch)):
        return next((_local(next(step[-1])) for step in iterator), None)  # Keras 3.10 has fewer parts
    return batch


def _some_rows(spec: Any, rows: int) -> tf.Tensor | None:
    """Returns placeholder rows of a dataset's type; None if the spec does not contain the shape."""
    spec = private.local_spec(spec)
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None or None in spec.shape[1:]:
        return None
    shape = [rows, *spec.shape[1:]] if spec.shape.rank else []
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)


def _local(batch: Any) -> Any:
    """Returns the first local replica's part of a batch, with at least one row to build a model from."""
    batch = tree.map_structure(
        lambda part: part.values[0] if isinstance(part, private.DistributedValues) else part, batch
    )
    return as_share(batch).data


def _shuffled_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        extended = current_strategy.of_strategy(distribute_strategy, DataParallel)
        if extended is None:
            original(self, distribute_strategy, *args, **kwargs)
            return
        if isinstance(kwargs.get("x"), SharedDataset):  # Keras knows only TensorFlow's classes; distribute it again
            kwargs["x"] = kwargs["x"].dataset
        calls = keras_step_calls.calls_of(extended, kwargs.get("x"))
        with _shuffling_alike(extended) as seed, extended.reading_for_keras(calls):
            original(self, distribute_strategy, *args, **kwargs)
        if isinstance(self.data_adapter, py_dataset_adapter.PyDatasetAdapter):
            order = random.Random(seed)
            for shuffles in (self.data_adapter, self.data_adapter.enqueuer):
                if shuffles is not None:
                    setattr(shuffles, _ORDER, order)

    return __init__


@contextlib.contextmanager
def _shuffling_alike(extended: DataParallel) -> Iterator[int]:
    """Context in which datasets that Keras makes are shuffled in the chief's order on every process.

    Yields:
        The seed for shuffling on the host.
    """
    global_seed = private.global_seed()
    state = np.array([global_seed is not None, global_seed or 0, random.SystemRandom().getrandbits(31)], np.int64)
    agreed = extended.all_processes.broadcast_once(
        tf.constant(state), "the seed for shuffling data", "int64 (3,)"
    ).numpy()
    if agreed[0]:
        seed = int(agreed[1]) + extended.reader
        with private.seeded(seed):
            yield seed
        return
    # No seed was set. A seeded operation would repeat the same order in every epoch, so draw the orders on the host.
    generator = np.random.default_rng(int(agreed[2]))
    original, thread = tf.random.shuffle, threading.get_ident()

    def shuffle(value: tf.Tensor, seed: int | None = None, name: str | None = None) -> tf.Tensor:
        if seed is not None or threading.get_ident() != thread:
            return original(value, seed, name)
        shuffled = tf.numpy_function(generator.permutation, [value], value.dtype)
        shuffled.set_shape(value.shape)
        return shuffled

    tf.random.shuffle = shuffle
    try:
        yield int(agreed[2])
    finally:
        tf.random.shuffle = original


_ORDER = "_tfdist_order"
"""Attribute of a `PyDataset`'s adapter or enqueuer: its random generator for shuffling, equal on all processes."""


class _Random(threading.local):
    """A stand-in for the module `random` in Keras's `PyDataset` adapter, with the calling thread's generator."""

    generator: Any = random

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator if hasattr(self.generator, name) else random, name)

    @contextlib.contextmanager
    def of(self, owner: Any) -> Iterator[None]:
        before, self.generator = self.generator, getattr(owner, _ORDER, random)
        try:
            yield
        finally:
            self.generator = before


_random = _Random()


def _in_its_order(original: Callable[..., Any]) -> Callable[..., Any]:
    def _finite_generator(self: Any) -> Iterator[Any]:
        batches = original(self)
        while True:
            with _random.of(self):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    return _finite_generator


def _run_in_its_order(original: Callable[..., Any]) -> Callable[..., Any]:
    def _run(self: Any) -> None:
        with _random.of(self):  # runs in its own thread
            original(self)

    return _run
