"""What becomes of a user's callbacks when several processes run them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import MismatchError
from tfdist.strategies import keras_backup, keras_saving
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.abilities import Ability, EndsEpochsTogether, LoadsForAll, WritesOnce
from tfdist.strategies.keras_private import tree

WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks whose work is to write: only the writer's do."""

_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


def adapt(callbacks: Any, extended: Ability) -> Any:
    """The callbacks that this process runs: the user's, around them tfdist's own.

    Args:
        callbacks: what the user gave to ``fit``.
        extended: of the strategy.

    Returns:
        A list, or the user's `CallbackList`, changed.
    """
    given = (
        callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else tree.flatten(callbacks or [])
    )
    kept = []
    for callback in given:
        if isinstance(callback, WRITING) and isinstance(extended, WritesOnce):
            # Where there are residuals, every rank saves its own when the writer saves the model.
            has_residuals = keras_saving.compressor_of(extended) is not None
            saves_own = has_residuals and isinstance(callback, keras.callbacks.ModelCheckpoint)
            if not extended.is_writer and not saves_own:
                continue
            _keep_local(callback, extended)
        elif isinstance(callback, keras.callbacks.BackupAndRestore) and isinstance(extended, LoadsForAll):
            keras_backup.share(callback, extended)
        kept.append(callback)
    own = [Together(extended)] if isinstance(extended, EndsEpochsTogether) else []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = [*kept, *own]
        for callback in own:
            callback.set_model(callbacks.model)
        return callbacks
    return [*kept, *own]


def _keep_local(callback: Any, extended: WritesOnce) -> None:
    """Whatever the writer's callback reads, it reads without the other ranks."""
    if getattr(callback, "_tfdist_local", False):
        return
    callback._tfdist_local = True
    for name in _HOOKS:
        setattr(callback, name, _locally(getattr(callback, name), extended))


def _locally(hook: Any, extended: WritesOnce) -> Any:
    @functools.wraps(hook)
    def method(*args: Any, **kwargs: Any) -> Any:
        with extended.local_only():
            return hook(*args, **kwargs)

    return method


class Together(keras.callbacks.Callback):
    """At the end of each epoch all ranks stop if any wishes to, and compare their weights and optimizers.

    Args:
        extended: of the strategy.
    """

    def __init__(self, extended: EndsEpochsTogether) -> None:
        super().__init__()
        self._extended = extended
        self._wish = False
        self._read: Callable[[], list[list[tf.Tensor]]] = list
        self._read_ids: list[int] | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Puts a wish off: a rank that left the epoch now would leave the others waiting."""
        if self.model.stop_training:
            self._wish, self.model.stop_training = True, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Asks all ranks.

        Raises:
            MismatchError: weights are not equal on all ranks.
        """
        wish = int(self._wish or self.model.stop_training)
        variables = self._compared()
        hashes = self._hashes(variables)
        # The largest of a number and of its negative are those of one copy if it is the same on all.
        numbers = np.array([wish, *map(max, hashes), *(-min(one) for one in hashes)], np.int64)
        found = self._extended.bridge.all_reduce([tf.constant(numbers)], combine=np.maximum)[0].numpy()
        differs = found[1 : 1 + len(hashes)] != -found[1 + len(hashes) :]
        if differs.any():
            self._tell(epoch, variables[int(differs.argmax())], hashes[int(differs.argmax())])
        self.model.stop_training = bool(found[0])
        self._wish = False

    def _compared(self) -> list[Any]:
        """The model's weights, and what the optimizer keeps; not the gradients that it accumulates, each its own."""
        if not self._extended.checks_weights or not self._extended.has_several_replicas:
            return []
        optimizer = self.model.optimizer
        kept = [] if optimizer is None else optimizer.variables
        own = {id(variable) for variable in _accumulators(optimizer)}
        return [*self.model.weights, *(variable for variable in kept if id(variable) not in own)]

    def _hashes(self, variables: list[Any]) -> list[list[int]]:
        """Of each copy of each variable."""
        copies = [private.copies(variable.value) for variable in variables]

        def read() -> list[list[tf.Tensor]]:
            return [[tf.identity(copy) for copy in group] for group in copies]

        ids = [id(variable) for variable in variables]
        if ids != self._read_ids:  # in the first epoch one by one: tracing takes longer
            self._read_ids, self._read = ids, tf.function(read)
            values = read()
        else:
            values = self._read()
        return [[_hash(value.numpy()) for value in group] for group in values]

    def _tell(self, epoch: int, variable: Any, hashes: list[int]) -> None:
        everyone = self._extended.exchange.all_gather(tf.constant([hashes], tf.int64)).numpy()
        others = [rank for rank, found in enumerate(everyone) if (found != everyone[0]).any()]
        where = f"on rank(s) {others} than on rank 0" if others else "on one device of a rank than on the others"
        raise MismatchError(
            f"after epoch {epoch + 1} the ranks' weights are not equal: {variable.path} is another {where}; this is "
            f"rank {self._extended.group.rank}. Something has changed weights or the state of the optimizer on some "
            "ranks only: a callback that decides by a rank's own values, or an assignment in a custom train_step. To "
            "train on all the same, make the strategy with check_weights=False."
        )


def _hash(value: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _accumulators(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    own = list(getattr(optimizer, "_accumulated_gradients", None) or [])
    return own + (_accumulators(inner) if inner is not None else [])
