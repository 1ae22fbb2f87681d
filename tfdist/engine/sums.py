"""Sums and means over processes of dense tensors and of slices together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.compressor import Compressed
from tfdist.engine.bridge import Bridge
from tfdist.engine.group import ProcessGroup
from tfdist.engine.slices import Slices


class Sums:
    """Sums over the processes of a group.

    Args:
        group: the processes that take part.

    Attributes:
        bridge: the all-reduces of dense tensors.
        slices: the all-reduces of `tf.IndexedSlices`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.bridge, self.slices = Bridge(group), Slices(group)
        self._size = group.size

    def all_reduce(
        self,
        values: Sequence[Any],
        names: Sequence[str],
        compressed: Sequence[Compressed | None] | None = None,
        mean: bool = False,
        weight: tf.Tensor | None = None,
        contributes: tf.Tensor | None = None,
        keep_rows: bool = True,
        adaptive: bool = False,
        in_memory: bool = False,
    ) -> list[Any]:
        """Sums values over the processes.

        Args:
            values: tensors or `tf.IndexedSlices`, in the order of the forward pass; tensors have the same shapes on all
                processes.
            names: names of the values, for messages.
            compressed: compression of each value; None for no compression.
            mean: whether the sums are divided by the number of processes.
            weight: float64 scalar that this process's values are multiplied by; see
                `tfdist.engine.bridge.Bridge.all_reduce`.
            contributes: boolean scalar; false if this process has no samples, and so no rows. Not with ``weight``.
            keep_rows: whether every occurrence of a row is kept; see `tfdist.engine.slices.Slices.all_reduce`.
            adaptive: whether `tfdist.collectives.adasum` combines the dense values.
            in_memory: whether dense values may be summed in shared memory; see
                `tfdist.engine.bridge.Bridge.all_reduce`.

        Returns:
            The sums or means, bitwise equal on all processes.
        """
        totals = list(values)
        dense = [place for place, value in enumerate(values) if not isinstance(value, tf.IndexedSlices)]
        dense.reverse()  # the last layer's gradient is ready first
        reduced = self.bridge.all_reduce(
            [values[place] for place in dense],
            names=[names[place] for place in dense],
            compressed=None if compressed is None else [compressed[place] for place in dense],
            mean=mean,
            weight=weight,
            adaptive=adaptive,
            in_memory=in_memory,
        )
        for place, total in zip(dense, reduced, strict=True):
            totals[place] = total
        sparse = [place for place, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        gathered = self.slices.all_reduce(
            [values[place] for place in sparse], contributes, keep_rows, weight, [names[place] for place in sparse]
        )
        for place, slices in zip(sparse, gathered, strict=True):
            totals[place] = divided(slices, self._size) if mean else slices
        return totals


def divided(slices: tf.IndexedSlices, count: int) -> tf.IndexedSlices:
    """Divides the values of slices by a number."""
    values = slices.values / tf.cast(count, slices.values.dtype)
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)
