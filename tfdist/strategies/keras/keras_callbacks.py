"""Adapts a user's callbacks to several processes."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdist.private.keras import tree
from tfdist.seams import trainer
from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import Ability

WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks that only write; they run on the writer alone."""

_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


def install() -> None:
    """Installs the hooks."""
    keras_hooks.add(AdaptedCallbacks, WriterOnlyCallbacks)


class AdaptedCallbacks(keras_hooks.ModelHooks[Ability]):
    """The hook of `fit` that asks all features' hooks to adapt the user's callbacks."""

    def fit(self, call: trainer.TrainerCall) -> None:
        """Replaces the user's callbacks by the adapted ones."""
        call.arguments["callbacks"] = adapt(call.arguments["callbacks"], call.model)


class WriterOnlyCallbacks(keras_hooks.ModelHooks[Ability]):
    """The hook that runs callbacks that write on the writer only, and without collectives."""

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Leaves out callbacks that write, on other processes."""
        kept = []
        for callback in given:
            if isinstance(callback, WRITING):
                saves = isinstance(callback, keras.callbacks.ModelCheckpoint) and self.extended.takes_part_in_saving
                if not self.extended.is_writer and not saves:
                    continue
                _keep_local(callback, self.extended)
            kept.append(callback)
        return kept


def adapt(callbacks: Any, model: Any) -> Any:
    """Returns the callbacks that this process runs: the user's, and those of hooks.

    Args:
        callbacks: the ``callbacks`` argument of ``fit``.
        model: the model that is trained.

    Returns:
        A list, or the user's `CallbackList`, modified in place.
    """
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    given = list(callbacks.callbacks) if is_list else tree.flatten(callbacks or [])
    adapted = list(given)
    for hooks in trainer.points.hooks_of(model, "callbacks"):
        adapted = hooks.callbacks(model, adapted)
    if not is_list:
        return adapted
    callbacks.callbacks[:] = adapted
    for callback in adapted:
        if callback not in given:
            callback.set_model(callbacks.model)
    return callbacks


def _keep_local(callback: Any, extended: Ability) -> None:
    """Makes the writer's callback run without collectives of the strategy that it is used with now."""
    is_adapted = hasattr(callback, "_tfdist_local")
    callback._tfdist_local = extended
    for name in () if is_adapted else _HOOKS:
        setattr(callback, name, _locally(getattr(callback, name), callback))


def _locally(hook: Any, callback: Any) -> Any:
    @functools.wraps(hook)
    def method(*args: Any, **kwargs: Any) -> Any:
        with callback._tfdist_local.local_only():
            return hook(*args, **kwargs)

    return method
