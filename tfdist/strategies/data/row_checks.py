"""Checks of the number of rows of batches, and readable versions of the errors that graphs raise for them."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfdist.private.models import layers_of
from tfdist.strategies.data.shares import Share, batch_size, rows_of_components
from tfdist.tensors import HOST

OTHER_ROWS = (
    "a batch cannot be divided among processes and devices, because its components have different numbers of rows, and "
    "it is not known which rows belong together. Give each process its own batches "
    "(strategy.distribute_datasets_from_function, or tfdist.DistributedOptimizer); or make each component a tensor, "
    "perhaps a ragged one, with one row for each sample; or move what all samples share, such as positions, into the "
    "model."
)
"""The beginning of the error about components with different numbers of rows."""

FIXED_ROWS = "the model accepts only batches of {} rows, because its inputs have batch_shape=({}, …), but"
"""The beginning of the error about a share that does not have the model's fixed number of rows."""


def equal_rows(batch: Any, is_there: tf.Tensor) -> list[tf.Operation]:
    """Returns operations that fail if components of a batch, which is to be divided, have different numbers of rows.

    Eagerly, this function itself raises the error.

    Args:
        batch: a batch of a dataset.
        is_there: whether the batch is a real one, and not a stand-in for a missing one; a boolean scalar.

    Raises:
        InvalidArgumentError: components have different numbers of rows; in a graph, the operations raise it.
    """
    rows = rows_of_components(batch)
    known = [tf.get_static_value(count) for count in rows.values()]
    if len(rows) < 2 or (None not in known and len(set(map(int, known))) == 1):
        return []
    counts = tf.stack(list(rows.values()))
    text = f"{OTHER_ROWS} The rows of {', '.join(rows)} are:"
    same = tf.reduce_all(counts[1:] == counts[0]) | ~is_there
    operation = _asserted(same, text, counts, len(rows))
    return [] if operation is None else [operation]


def fixed_rows(share: Share, rows: int | None) -> Share:
    """Returns the share, with a check for models that accept only one number of rows, such as with stateful layers.

    Args:
        share: a share of a batch.
        rows: number of rows that the model accepts; None if it accepts any.

    Raises:
        ValueError: the share has another number of rows, and its shape shows it.
        InvalidArgumentError: the share has another number of rows; raised when the graph runs.
    """
    if rows is None:
        return share
    text = FIXED_ROWS.format(rows, rows)
    known = tf.get_static_value(batch_size(share.data))
    if known is not None and int(known) != rows:  # the layers would fail next, less readably
        raise _of_fixed_rows(text, int(known))
    check = _asserted(tf.equal(share.rows, rows), text, share.rows, 1)
    with tf.control_dependencies([] if check is None else [check]):
        return Share(tf.nest.map_structure(tf.identity, share.data, expand_composites=True), share.rows)


def _asserted(condition: tf.Tensor, text: str, counts: tf.Tensor, shown: int) -> tf.Operation | None:
    """Returns an operation that fails if a condition does not hold, on the host, as GPUs have no strings."""
    with tf.device(HOST):
        return tf.raw_ops.Assert(condition=condition, data=[tf.constant(text), counts], summarize=shown)


def rows_of_state(model: Any) -> int | None:
    """Returns the only number of rows that a model accepts because it has stateful layers; None if it accepts any.

    Keras trains other models on batches of any size, even if their inputs name one.

    Args:
        model: a Keras model.
    """
    has_state = any(getattr(layer, "stateful", False) for layer in layers_of(model))
    return rows_of_model(model) if has_state else None


def rows_of_model(model: Any) -> int | None:
    """Returns the batch size in the shapes of a model's inputs; None if they contain none.

    Args:
        model: a Keras model.
    """
    inputs = getattr(model, "inputs", None) or []
    return next((part.shape[0] for part in inputs if len(part.shape)), None)


def readable(error: tf.errors.InvalidArgumentError) -> ValueError | None:
    """Returns the readable version of an error of this module's checks; None for any other error.

    Args:
        error: an error of TensorFlow, perhaps from a graph.
    """
    if match := re.search(re.escape(OTHER_ROWS) + r" The rows of (.*) are:\] \[([\d ]+)\]", error.message):
        pairs = zip(match[1].split(", "), match[2].split(), strict=False)
        return ValueError(f"{OTHER_ROWS} Rows: {', '.join(f'{name} has {count}' for name, count in pairs)}.")
    pattern = re.escape(FIXED_ROWS).replace(r"\{\}", r"\d+")
    if match := re.search(rf"({pattern})\] \[(\d+)\]", error.message):
        return _of_fixed_rows(match[1], int(match[2]))
    return None


def _of_fixed_rows(text: str, got: int) -> ValueError:
    return ValueError(
        f"{text} this replica got {got} rows, its share of a batch. Give the inputs the rows of a share, "
        "batch_shape=(rows // strategy.num_replicas_in_sync, …), and leave out a smaller last batch."
    )
