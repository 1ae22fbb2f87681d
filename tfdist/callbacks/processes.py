"""The processes that train a callback's model."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.engine.group import ProcessGroup
from tfdist.notices import notice_once
from tfdist.optimizers.keras_optimizers import gradients_of
from tfdist.runtime import world
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel


def has_others(callback: keras.callbacks.Callback) -> bool:
    """Returns whether other processes train a callback's model, too; if not, says so once for each kind of callback.

    Args:
        callback: a callback with a model.
    """
    alone = processes_of(callback.model).size == 1
    if alone:
        notice_once("tfdist: the callback %s does nothing: this process trains alone.", type(callback).__name__)
    return not alone


def processes_of(model: Any) -> ProcessGroup:
    """Returns the processes that train a model together; without a strategy all of the job, or this process alone.

    Args:
        model: a Keras model.
    """
    extended = current_strategy.of_model(model, DataParallel)
    if extended is not None:
        return extended.group
    gradients = gradients_of(getattr(model, "optimizer", None))
    return world.current().group if gradients is None else gradients.group
