"""Datasets of batches that are dealt out: what comes with a ticket says which batch to make."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.parameter_server.dealing.plan import Plan
from tfdist.private import tensorflow as private

Tickets = Callable[[], Iterator[tuple[int, Any]]]
"""Makes, for each iteration over a dataset, an iterator over tickets and what a source reads their batches by."""


class Ticketed(NamedTuple):
    """A batch with its ticket.

    Attributes:
        ticket: an int64 scalar.
        batch: as of `Source`.
    """

    ticket: Any
    batch: Any


class Batches(ABC):
    """Batches that are made from what comes with their tickets.

    Args:
        element_spec: the type of a batch, a structure of `tf.TypeSpec`.
        shuffle: what Keras would shuffle: all samples, the samples inside each batch, or nothing.
    """

    def __init__(self, element_spec: Any, shuffle: bool | Literal["batch"] = False) -> None:
        self.element_spec = element_spec
        self.shuffle = shuffle

    @property
    @abstractmethod
    def batches(self) -> int | None:
        """The number of batches; None if nobody knows."""

    @abstractmethod
    def plan(self, seed: int | None) -> Plan:
        """How an epoch is divided.

        Args:
            seed: of the order, if there is a choice.
        """

    @abstractmethod
    def first(self) -> Any:
        """A batch of the type of the first one, eagerly, to learn its shapes."""

    @property
    @abstractmethod
    def part_specs(self) -> Sequence[tf.TensorSpec]:
        """The types of `parts`."""

    @abstractmethod
    def parts(self, found: Any) -> Sequence[Any]:
        """The parts of a batch that Python reads; they share no memory with the data.

        Args:
            found: what came with the ticket.
        """

    @abstractmethod
    def assembled(self, parts: Sequence[tf.Tensor]) -> Any:
        """A batch from what `parts` has read; in a graph, or eagerly."""


def dataset(source: Batches, tickets: Tickets, with_tickets: bool = False, prefetch: int = 1) -> tf.data.Dataset:
    """A dataset of the batches that tickets are for.

    Each iteration calls ``tickets`` when its first batch is asked for, and closes a generator that it returns when the
    iteration ends. Its ``next`` may wait: it runs in a thread of `tf.data`, without TensorFlow's locks.

    Args:
        source: of the batches.
        tickets: makes the iterator over tickets.
        with_tickets: whether elements are `Ticketed`.
        prefetch: how many batches are made ahead of the one that was asked for last; 0 for none.

    Returns:
        A dataset of unknown cardinality. It raises `tf.errors.OpError` if ``tickets`` or the source raises.
    """
    iterations: dict[int, Iterator[tuple[int, np.ndarray]]] = {}
    numbers = itertools.count()
    specs = source.part_specs

    def start() -> int:
        number = next(numbers)
        iterations[number] = tickets()
        return number

    def read(number: np.ndarray) -> tuple[Any, ...]:
        ticket, found = next(iterations[int(number)])
        return np.int64(ticket), *source.parts(found)

    def following(number: tf.Tensor) -> Any:
        ticket, *parts = tf.numpy_function(
            read, [number], [tf.int64, *(spec.dtype for spec in specs)], name="tfdist_batch"
        )
        ticket.set_shape([])
        for part, spec in zip(parts, specs, strict=True):
            part.set_shape(spec.shape)
        batch = source.assembled(parts)
        return Ticketed(ticket, batch) if with_tickets else batch

    def finish(number: int) -> None:
        iterator = iterations.pop(number)
        if hasattr(iterator, "close"):
            iterator.close()

    spec = Ticketed(tf.TensorSpec([], tf.int64), source.element_spec) if with_tickets else source.element_spec
    made = private.not_tuned(private.generated(start, following, finish, spec))
    return made.prefetch(prefetch) if prefetch else made


def components(spec: tf.TypeSpec) -> list[tf.TensorSpec]:
    """The types of the tensors that a part of a batch consists of.

    Args:
        spec: of the part; None has none.
    """
    return [] if isinstance(spec, private.NoneSpec) else tf.nest.flatten(spec, expand_composites=True)


def of_components(spec: tf.TypeSpec, parts: list[tf.Tensor]) -> Any:
    """A part of a batch.

    Args:
        spec: of the part.
        parts: as of `components`.
    """
    return None if isinstance(spec, private.NoneSpec) else tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
