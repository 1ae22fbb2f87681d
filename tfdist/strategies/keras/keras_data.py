"""Data of Keras under a strategy: all processes shuffle equally."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, MutableSequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.private import epochs
from tfdist.private import tensorflow as private
from tfdist.private.datasets import ShardsOfDataset
from tfdist.private.keras import py_dataset_adapter, tf_dataset_adapter, tf_trainer
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.data.datasets import SharedDataset
from tfdist.strategies.keras import keras_step_calls


def install() -> None:
    """Installs the seams for data."""
    replace(tf_trainer.TFEpochIterator, "__init__", _shuffled_alike)
    replace(py_dataset_adapter.PyDatasetAdapter, "_finite_generator", _in_its_order)
    replace(py_dataset_adapter.OrderedEnqueuer, "_run", _run_in_its_order)
    py_dataset_adapter.random = _random


def _shuffled_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        extended = current_strategy.of_strategy(distribute_strategy, DataParallel)
        if extended is None:
            original(self, distribute_strategy, *args, **kwargs)
            return
        if isinstance(kwargs.get("x"), SharedDataset):  # Keras knows only TensorFlow's classes; distribute it again
            kwargs["x"] = kwargs["x"].dataset
        calls = keras_step_calls.calls_of(extended, kwargs.get("x"))
        with _shuffling_alike(extended) as order, extended.reading_for_keras(calls):
            original(self, distribute_strategy, *args, **kwargs)
        distributed = epochs.dataset_of(self)
        if isinstance(distributed, ShardsOfDataset):  # it has another number of batches than its dataset
            self.data_adapter = tf_dataset_adapter.TFDatasetAdapter(distributed)
            self.reset()
        if isinstance(self.data_adapter, py_dataset_adapter.PyDatasetAdapter):
            for shuffles in (self.data_adapter, self.data_adapter.enqueuer):
                if shuffles is not None:
                    setattr(shuffles, _ORDER, order)

    return __init__


@contextlib.contextmanager
def _shuffling_alike(extended: DataParallel) -> Iterator[random.Random]:
    """Context in which datasets that Keras makes are shuffled in the chief's order on every process.

    Yields:
        The random generator for shuffling on the host.
    """
    global_seed, (version, numbers, _) = private.global_seed(), random.getstate()
    seeds = [global_seed is not None, global_seed or 0, random.SystemRandom().getrandbits(31)]
    agreed = extended.all_processes.broadcast_once(
        tf.constant(np.array([*seeds, *numbers], np.int64)), "the seed for shuffling data", "int64"
    ).numpy()
    order = _Order()
    order.setstate((version, tuple(agreed[len(seeds) :].tolist()), None))
    if extended.reader:
        order.seed(order.getrandbits(32) + extended.reader)
    if agreed[0]:
        with private.seeded(int(agreed[1]) + extended.reader):
            yield order
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
        yield order
    finally:
        tf.random.shuffle = original


class _Order(random.Random):
    """The chief's random generator, as it was when an iterator was made.

    What it draws, this process's own generator draws, too. So a program draws what it draws in plain Keras, and the
    next iterator has another order.
    """

    def shuffle(self, x: MutableSequence[Any]) -> None:
        random.shuffle(list(x))
        super().shuffle(x)


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
