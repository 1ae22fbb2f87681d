"""What a `keras.distribution.Distribution` keeps to itself."""

from __future__ import annotations

from typing import Any


def layouts_of(distribution: Any) -> Any:
    """Returns the `keras.distribution.LayoutMap` of a distribution; None if it has none."""
    return getattr(distribution, "_layout_map", None)


def deals(distribution: Any) -> bool:
    """Returns whether processes pass the same data, which are divided; otherwise each passes its own."""
    return bool(getattr(distribution, "_auto_shard_dataset", True))


def leave_data_alone(distribution: Any) -> None:
    """Makes Keras accept arrays under a distribution of several processes, and divide no data itself."""
    distribution._is_multi_process = False
    distribution.distribute_dataset = _as_it_is
    if hasattr(distribution, "num_data_shards"):  # later than Keras 3.15
        distribution._num_processes = 1


def _as_it_is(dataset: Any) -> Any:
    return dataset
