"""The seams for TensorFlow's own iterators: all processes of a strategy agree on whether there is another batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.private import datasets as private_datasets
from tfdist.private import tensorflow as private
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel


def install() -> None:
    """Installs the seams."""
    replace(private.input_lib, "_calculate_replicas_with_values", _counted_by_all)
    replace(private.multi_device_iterator_ops, "_create_device_dataset", _not_tuned)


def _counted_by_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Counts the replicas that have data over all processes, from the local replicas' optionals."""

    def calculate(strategy: Any, input_workers: Any, optional_list: list[list[Any]]) -> Any:
        extended = current_strategy.of_strategy(strategy, DataParallel)
        if extended is None:
            return original(strategy, input_workers, optional_list)
        return extended.count([optional for optionals in optional_list for optional in optionals])

    return calculate


def _not_tuned(original: Callable[..., Any]) -> Callable[..., Any]:
    """Disables the autotuner also for the device datasets that read a dataset of tfdist."""

    def create_device_dataset(*args: Any, **kwargs: Any) -> Any:
        dataset = original(*args, **kwargs)
        return private_datasets.not_tuned(dataset) if private_datasets.is_iterating_ours() else dataset

    return create_device_dataset
