"""Datasets of batches that are dealt to workers: the data that come with a ticket say which batch to make."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.parameter_server.dealing.plan import Plan
from tfdist.private import datasets as private_datasets

Tickets = Callable[[], Iterator[tuple[int, Any]]]
"""Makes an iterator over tickets and the data that their batches are read by; once for each iteration of a dataset."""


class Ticketed(NamedTuple):
    """A batch with its ticket.

    Attributes:
        ticket: the ticket, an int64 scalar.
        batch: the batch, as its source makes it.
    """

    ticket: Any
    batch: Any


class Batches(ABC):
    """Source of batches, which are made from the data that come with their tickets.

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
        """The number of batches; None if it is unknown."""

    @abstractmethod
    def plan(self, seed: int | None) -> Plan:
        """Returns how an epoch is divided into batches.

        Args:
            seed: seed of the order; None keeps the order of the data.
        """

    @abstractmethod
    def first(self) -> Any:
        """Returns the first batch eagerly, or the types of its parts, for Keras to learn shapes."""

    @property
    @abstractmethod
    def part_specs(self) -> Sequence[tf.TensorSpec]:
        """The types of `parts`."""

    @abstractmethod
    def parts(self, payload: Any) -> Sequence[Any]:
        """Returns the parts of a batch that Python reads; they share no memory with the data.

        Args:
            payload: the data that came with the ticket.
        """

    @abstractmethod
    def assembled(self, parts: Sequence[tf.Tensor]) -> Any:
        """Returns a batch made from what `parts` has read; in a graph, or eagerly."""


def dataset(source: Batches, tickets: Tickets, with_tickets: bool = False, prefetch: int = 1) -> tf.data.Dataset:
    """Returns a dataset of the batches that tickets are for.

    Each iteration calls ``tickets`` when its first batch is requested, and closes the returned generator when the
    iteration ends. The generator's ``next`` may wait: it runs in a thread of `tf.data`, without TensorFlow's locks.

    Args:
        source: source of the batches.
        tickets: function that makes the iterator over tickets.
        with_tickets: whether elements are `Ticketed`.
        prefetch: number of batches that are made ahead of the last one requested; 0 for none.

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
        ticket, payload = next(iterations[int(number)])
        return np.int64(ticket), *source.parts(payload)

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
    made = private_datasets.not_tuned(private_datasets.generated(start, following, finish, spec))
    return made.prefetch(prefetch) if prefetch else made


def components(spec: tf.TypeSpec) -> list[tf.TensorSpec]:
    """Returns the types of the tensors that a part of a batch consists of.

    Args:
        spec: type of the part; `NoneSpec` has no tensors.
    """
    return [] if isinstance(spec, private_datasets.NoneSpec) else tf.nest.flatten(spec, expand_composites=True)


def pack_components(spec: tf.TypeSpec, parts: list[tf.Tensor]) -> Any:
    """Returns a part of a batch, made of its tensors.

    Args:
        spec: type of the part.
        parts: tensors of the types that `components` returns.
    """
    return (
        None
        if isinstance(spec, private_datasets.NoneSpec)
        else tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
    )
