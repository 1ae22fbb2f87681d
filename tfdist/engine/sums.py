"""Sums and means over processes of dense tensors and of slices together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.compressor import Compressed
from tfdist.engine.bridge import Bridge
from tfdist.engine.group import Group
from tfdist.engine.slices import Slices


class Sums:
    """Sums over the processes of a group.

    Args:
        group: the processes that take part.

    Attributes:
        bridge: sums the dense tensors.
        slices: gathers the rows of the others.
    """

    def __init__(self, group: Group) -> None:
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
    ) -> list[Any]:
        """Sums values over the processes.

        Args:
            values: tensors or `tf.IndexedSlices`, in the order of the forward pass; tensors of the same shapes on all
                processes.
            names: of the values, for messages.
            compressed: how each value is compressed; None for not at all.
            mean: whether the sums are divided by the number of processes.
            weight: as in `tfdist.engine.bridge.Bridge.all_reduce`, for dense values and for slices.
            contributes: as in `tfdist.engine.slices.Slices.all_reduce`; not with a weight.
            keep_rows: as in `tfdist.engine.slices.Slices.all_reduce`.
            adaptive: as in `tfdist.engine.bridge.Bridge.all_reduce`; for dense values.

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
        )
        for place, total in zip(dense, reduced, strict=True):
            totals[place] = total
        for place, value in enumerate(values):
            if isinstance(value, tf.IndexedSlices):
                slices = self.slices.all_reduce(value, contributes, keep_rows, weight)
                totals[place] = divided(slices, self._size) if mean else slices
        return totals


def divided(slices: tf.IndexedSlices, count: int) -> tf.IndexedSlices:
    """Slices whose values are divided by a number."""
    values = slices.values / tf.cast(count, slices.values.dtype)
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)
