"""Checks that batches can be divided into micro-batches of equal size."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.private.keras import tree

_KERAS_DEFAULT = 32


def check(x: Any, batch_size: int | None, micro_batches: int, data: int = 1) -> None:
    """Checks the size of full batches, if it is known; the last batch of an epoch may be smaller.

    Args:
        x: data passed to ``fit``.
        batch_size: batch size passed to ``fit``; None for Keras's default.
        micro_batches: number of micro-batches of each replica's batch.
        data: number of replicas.

    Raises:
        ValueError: full batches cannot be divided into micro-batches of equal size.
    """
    size = _size(x, batch_size)
    parts = micro_batches * data
    if size is None or size % parts == 0:
        return
    below = size // parts * parts
    near = " and ".join(str(multiple) for multiple in (below, below + parts) if multiple)
    fitting = [number for number in range(1, size + 1) if size % (number * data) == 0]
    advice = f"Batches of {near} samples do"
    if fitting:
        advice += f"; batches of {size} do with micro_batches={' or '.join(map(str, fitting))}"
    over = f" in each of data={data} pipelines" if data > 1 else ""
    raise ValueError(
        f"PipelineStrategy(micro_batches={micro_batches}): batches of {size} samples do not make {micro_batches} "
        f"micro-batches of equal size{over}. {advice}."
    )


def _size(x: Any, batch_size: int | None) -> int | None:
    """Returns the number of samples of a full batch; None if it is unknown, or if no batch is full."""
    if isinstance(x, (tf.data.Dataset, tf.distribute.DistributedDataset)):
        specs = [leaf for leaf in tree.flatten(x.element_spec) if isinstance(leaf, tf.TensorSpec)]
        return specs[0].shape[0] if specs and specs[0].shape.rank else None
    arrays = [leaf for leaf in tree.flatten(x) if getattr(leaf, "shape", None)]
    if not arrays:
        return None
    size = _KERAS_DEFAULT if batch_size is None else batch_size
    return size if arrays[0].shape[0] >= size else None
