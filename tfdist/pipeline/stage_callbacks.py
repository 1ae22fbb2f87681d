"""Callbacks that read weights, of which each process holds those of its stages."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdist.strategies.abilities import HasStages


def adapted(given: list[Any], extended: HasStages) -> list[Any]:
    """Callbacks in which other processes give the writer their weights.

    Args:
        given: the user's.
        extended: the strategy's `extended`.
    """
    return [_showing_all_weights(callback, extended) if _reads_weights(callback) else callback for callback in given]


class _GivesWeights(keras.callbacks.Callback):
    """Gives the writer the weights of this process's stages, when it reads them.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: HasStages) -> None:
        super().__init__()
        self._extended = extended

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        self._extended.by_the_writer(self.model, lambda: None)


def _reads_weights(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.TensorBoard) and bool(callback.histogram_freq)


def _showing_all_weights(callback: Any, extended: HasStages) -> Any:
    """A callback that reads weights at the end of epochs; on processes but the writer, one that gives it theirs."""
    if not extended.is_writer:
        return _GivesWeights(extended)
    if not getattr(callback, "_tfdist_local", False):
        hook = callback.on_epoch_end

        @functools.wraps(hook)
        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            extended.by_the_writer(callback.model, lambda: hook(epoch, logs))

        callback.on_epoch_end = on_epoch_end
    return callback
