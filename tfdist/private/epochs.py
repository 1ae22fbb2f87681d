"""Private members of Keras's epoch iterators and data adapters, used here and in `tfdist.seams` only."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.private.datasets import not_tuned


def spec_of(iterator: Any) -> Any:
    """Returns the element spec of the dataset that an epoch iterator reads; None if the dataset has none."""
    return getattr(iterator._distributed_dataset, "element_spec", None)


def untune(iterator: Any) -> None:
    """Disables `tf.data`'s autotuner for what an epoch iterator reads; see `tfdist.private.datasets.not_tuned`."""
    if isinstance(iterator._distributed_dataset, tf.data.Dataset):
        iterator._distributed_dataset = not_tuned(iterator._distributed_dataset)


def end_epoch(iterator: Any) -> None:
    """Ends an epoch before its data end: the next epoch begins with new batches."""
    iterator._current_iterator = None
    iterator.data_adapter.on_epoch_end()


def arrays_of(adapter: Any) -> Any:
    """Returns the arrays that an `ArrayDataAdapter` cuts into batches."""
    return adapter._inputs


def standardized(adapter: Any, batch: Any) -> Any:
    """Returns a batch of a `PyDataset` in the form in which its adapter yields it."""
    return adapter._standardize_batch(batch)


def dataset_of(iterator: Any) -> Any:
    """Returns the distributed dataset that a `keras.src.backend.tensorflow.trainer.TFEpochIterator` reads."""
    return iterator._distributed_dataset
