"""Data without random access: the chief reads them in their order, and each batch goes to one worker.

Parts of a batch are sent as TensorFlow serializes tensors, a format that cannot contain code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.parameter_server.dealing.plan import Plan
from tfdist.private import datasets as private_datasets
from tfdist.private.keras import data_adapters, tree
from tfdist.strategies.servers.dealt_batches import Batches, components, pack_components

log = logging.getLogger("tfdist")

_SENT = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec, private_datasets.NoneSpec)


class ChiefStream(Batches):
    """Batches that the chief reads. Other workers make an equal object for data of the same type, and read nothing.

    Args:
        adapter: Keras's adapter of the data that `fit` was given.
        data: the dataset of the adapter.
        element_spec: type of the dataset's elements, with `NoneSpec` in place of None.
        steps: number of batches in an epoch, which goes on where the last one ended; None reads all data in each epoch.
    """

    def __init__(self, adapter: Any, data: tf.data.Dataset, element_spec: Any, steps: int | None) -> None:
        super().__init__(element_spec)
        self._adapter = adapter
        self._data = data
        self._steps = steps
        self._iterator: Iterator[Any] | None = None
        self._leaves = tree.flatten(element_spec)

    @property
    def batches(self) -> int | None:
        """Number of batches in an epoch; None if it is unknown."""
        count = int(self._data.cardinality())
        return self._steps or (count if count >= 0 else None)

    def plan(self, seed: int | None) -> Plan:
        """Returns the plan of a stream, whose order is the chief's."""
        return Plan(None, 1, None)

    def first(self) -> Any:
        """Returns shapes and dtypes only, without a batch."""
        return tree.map_structure(
            lambda spec: None if isinstance(spec, private_datasets.NoneSpec) else spec, self.element_spec
        )

    def stream(self) -> Iterator[list[np.ndarray]]:
        """Reads the batches of an epoch, on the chief.

        Yields:
            The serialized components of a batch, each uint8 ``(bytes,)``.
        """
        self._adapter.on_epoch_begin()
        for batch in self._data if self._steps is None else self._next_steps(self._steps):
            parts = tree.flatten(batch)
            tensors = [
                component
                for part, spec in zip(parts, self._leaves, strict=True)
                if not isinstance(spec, private_datasets.NoneSpec)
                for component in tf.nest.flatten(part, expand_composites=True)
            ]
            yield [np.frombuffer(tf.io.serialize_tensor(tensor).numpy(), np.uint8) for tensor in tensors]
        self._adapter.on_epoch_end()

    def _next_steps(self, steps: int) -> Iterator[Any]:
        """Reads as Keras does with ``steps_per_epoch``: goes on where the last epoch ended, and restarts at the end."""
        for step in range(steps):
            batch = None if self._iterator is None else next(self._iterator, None)
            if batch is None and step:
                self._iterator = None
                log.warning("tfdist: the data ended before the epoch's steps_per_epoch steps: use `.repeat()`.")
                return
            if batch is None:
                self._iterator = iter(self._data)
                if (batch := next(self._iterator, None)) is None:
                    return
            yield batch

    @property
    def part_specs(self) -> Sequence[tf.TensorSpec]:
        """String types, one for each component."""
        return [tf.TensorSpec([], tf.string) for spec in self._leaves for _ in components(spec)]

    def parts(self, payload: Sequence[np.ndarray]) -> Sequence[Any]:
        """Returns the serialized components of a batch as strings.

        Args:
            payload: serialized components, as `stream` yields them.

        Raises:
            ValueError: the chief's batches have another structure.
        """
        expected = len(self.part_specs)
        if len(payload) != expected:
            raise ValueError(
                f"a batch of the chief's data has {len(payload)} parts, and those of this worker have {expected}: give "
                "`fit` data of the same type on every task"
            )
        return [np.array(part.tobytes(), object) for part in payload]

    def assembled(self, parts: Sequence[tf.Tensor]) -> Any:
        """Returns a batch, parsed from its serialized components."""
        left = iter(parts)
        leaves = [
            pack_components(
                spec,
                [
                    tf.ensure_shape(tf.io.parse_tensor(next(left), component.dtype), component.shape)
                    for component in components(spec)
                ],
            )
            for spec in self._leaves
        ]
        return tree.pack_sequence_as(self.element_spec, leaves)


def stream_of(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    shuffle: Any,
    class_weight: dict[int, float] | None,
    steps_per_epoch: int | None,
) -> ChiefStream | str:
    """Returns the data that `fit` was given as a stream; the arguments are those of `fit`.

    Returns:
        The stream; or the reason why there is none, a clause about the data for a message.

    Raises:
        ValueError: Keras does not take these arguments either.
    """
    if isinstance(x, tf.distribute.DistributedDataset):
        return "the dataset is distributed already"
    adapter = data_adapters.get_data_adapter(
        x, y, sample_weight, batch_size, steps_per_epoch, shuffle=shuffle, class_weight=class_weight
    )
    data = adapter.get_tf_dataset()
    spec = tree.map_structure(
        lambda part: private_datasets.NoneSpec() if isinstance(part, tf.OptionalSpec) else part, data.element_spec
    )
    for part in tree.flatten(spec):
        if not isinstance(part, _SENT):
            return f"batches with a {type(part).__name__} cannot be sent"
    return ChiefStream(adapter, data, spec, steps_per_epoch)
