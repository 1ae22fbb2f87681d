"""Callbacks that read weights, adapted to weights on several processes."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdist.strategies import keras_hooks
from tfdist.strategies.divided_abilities import DividesUpdates


def adapted(given: list[Any], extended: DividesUpdates) -> list[Any]:
    """Replaces callbacks that read weights by ones in which other processes send the writer their weights.

    Args:
        given: the user's callbacks.
        extended: the strategy's `extended`.
    """
    return [_showing_all_weights(callback, extended) if _reads_weights(callback) else callback for callback in given]


class _GivesWeights(keras_hooks.StrategyCallback[DividesUpdates]):
    """A callback that sends the writer this process's weights when the writer reads them."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Sends the writer this process's weights."""
        self._extended.run_on_writer(self.model, lambda: None)


def _reads_weights(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.TensorBoard) and bool(callback.histogram_freq)


def _showing_all_weights(callback: Any, extended: DividesUpdates) -> Any:
    """Returns the callback with access to all weights on the writer, and one that sends weights on other processes."""
    if not extended.is_writer:
        return _GivesWeights(extended)
    is_adapted = hasattr(callback, "_tfdist_divided")
    callback._tfdist_divided = extended  # of the strategy that it is used with now
    if not is_adapted:
        hook = callback.on_epoch_end

        @functools.wraps(hook)
        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            callback._tfdist_divided.run_on_writer(callback.model, lambda: hook(epoch, logs))

        callback.on_epoch_end = on_epoch_end
    return callback
