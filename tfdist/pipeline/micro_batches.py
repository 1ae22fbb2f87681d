"""Batches that are divided into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.private import models
from tfdist.private.keras import backend, tree
from tfdist.strategies.data.shares import batch_size


class MicroBatches:
    """A batch divided into micro-batches that are as equal as possible.

    If a batch has fewer samples than micro-batches, some micro-batches have one stand-in row and no samples.

    Args:
        batch: tensors with one or more samples along the first axis, in any structure.
        count: number of micro-batches.

    Attributes:
        count: as given.
        rows: number of samples of each micro-batch, as int64 scalars.
    """

    def __init__(self, batch: Any, count: int) -> None:
        self.count = count
        self._batch = batch
        total = batch_size(batch)
        self._ends = [(number + 1) * total // count for number in range(count)]
        self._begins = [tf.zeros([], tf.int64), *self._ends[:-1]]
        self.rows = [end - begin for begin, end in zip(self._begins, self._ends, strict=True)]
        self._total = total

    def weight(self, number: int) -> tf.Tensor:
        """Returns the fraction of all samples that a micro-batch has, a float64 scalar.

        Args:
            number: number of the micro-batch.
        """
        return tf.math.divide_no_nan(tf.cast(self.rows[number], tf.float64), tf.cast(self._total, tf.float64))

    def part(self, value: Any, number: int) -> Any:
        """Returns one micro-batch of tensors of the batch.

        Args:
            value: tensors of the batch, in any structure; None stays None.
            number: number of the micro-batch.
        """
        begin, end = self._begins[number], self._ends[number]
        begin = tf.minimum(begin, self._total - 1)
        end = tf.maximum(end, begin + 1)

        def rows(tensor: Any) -> Any:
            if isinstance(tensor, tf.SparseTensor):
                size = tf.concat([[end - begin], tensor.dense_shape[1:]], 0)
                start = tf.concat([[begin], tf.zeros_like(tensor.dense_shape[1:])], 0)
                return tf.sparse.slice(tensor, start, size)
            if not tf.is_tensor(tensor) or tensor.shape.rank == 0:
                return tensor
            return tensor[begin:end]

        return tree.map_structure(rows, value)

    def joined(self, parts: Sequence[Any]) -> Any:
        """Concatenates what was computed for each micro-batch, without stand-in rows.

        Args:
            parts: tensors with their masks, in any structure, for each micro-batch.
        """

        def join(*tensors: Any) -> Any:
            if tensors[0] is None:
                return None
            if tensors[0].shape.rank == 0:
                raise ValueError("the outputs of a pipeline must have samples along their first axis; got a scalar")
            whole = self._concatenated(tensors)
            masks = [backend.get_keras_mask(tensor) for tensor in tensors]
            if all(mask is not None for mask in masks):
                backend.set_keras_mask(whole, self._concatenated(masks))
            logits = [models.logits_of(tensor) for tensor in tensors]
            if all(part_logits is not None for part_logits in logits):
                models.set_logits(whole, self._concatenated(logits))
            return whole

        return tree.map_structure(join, *parts)

    def _concatenated(self, tensors: Sequence[Any]) -> Any:
        if self.count == 1:
            return tf.identity(tensors[0])
        real = [
            tensor[: tf.where(rows > 0, tf.shape(tensor, out_type=tf.int64)[0], 0)]
            for tensor, rows in zip(tensors, self.rows, strict=True)
        ]
        return tf.concat(real, 0)
