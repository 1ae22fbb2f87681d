"""Private members of what Keras reads batches with, used here and in `tfdist.seams` only."""

from __future__ import annotations

from typing import Any


def spec_of(iterator: Any) -> Any:
    """The element spec of what an epoch iterator reads; None if that has none."""
    return getattr(iterator._distributed_dataset, "element_spec", None)


def end_epoch(iterator: Any) -> None:
    """Ends an epoch before its data end: the next one begins with new batches."""
    iterator._current_iterator = None
    iterator.data_adapter.on_epoch_end()


def arrays_of(adapter: Any) -> Any:
    """The arrays that an `ArrayDataAdapter` cuts into batches."""
    return adapter._inputs


def standardized(adapter: Any, batch: Any) -> Any:
    """A batch of a `PyDataset` as its adapter passes it on."""
    return adapter._standardize_batch(batch)
