"""Saving and loading on several processes: one process writes, and one reads for all."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.compressor import Compressor, Variables
from tfdist.engine.exchange import Exchange
from tfdist.engine.group import ProcessGroup
from tfdist.private.keras import saving_api
from tfdist.private.optimizers import key_of
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import atomic_files, current_strategy, keras_hooks
from tfdist.strategies.abilities import Ability, DataParallel
from tfdist.strategies.keras import keras_accumulation, keras_outer
from tfdist.strategies.keras.keras_variables import broadcast_state
from tfdist.strategies.round_abilities import ElasticMembership
from tfdist.thread_values import ThreadValue

log = logging.getLogger("tfdist")


_saves_alone = ThreadValue(False)
"""Whether a thread saves files without calling `save_training_state`."""


def without_others() -> contextlib.AbstractContextManager[None]:
    """Context in which saving a model does not call `save_training_state`, because the caller has done so."""
    return _saves_alone.set_to(True)


def install() -> None:
    """Installs the seams for saving."""
    keras_hooks.add(WrittenOnce)
    replace(keras.Model, "load_weights", _read_for_all)
    for owner in (keras.models, keras.saving):
        replace(owner, "load_model", _after_the_chief)
        replace(owner, "save_model", _saved_by_method)
    saving_api.load_model = keras.saving.load_model


def _saved_by_method(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if current_strategy.of_model(model, Ability) is None:
            return original(model, *args, **kwargs)
        return model.save(*args, **kwargs)

    return save_model


class WrittenOnce(keras_hooks.ModelHooks[Ability]):
    """Hooks that let only the writer save, without collectives and atomically."""

    def save(self, call: TrainerCall) -> None:
        """Saves a model or its weights, and the residuals and outer optimizers' states beside it."""
        keras_accumulation.warn_of_parts(call.model, self.extended)
        if not _saves_alone.value:
            save_training_state(call.model, self.extended, call.arguments["filepath"])
        self._by_the_writer(call, _atomically if _is_one_new_file(call.arguments) else TrainerCall.inner)

    save_weights = save

    def export(self, call: TrainerCall) -> None:
        """Exports a model on the writer only."""
        self._by_the_writer(call, TrainerCall.inner)

    def _by_the_writer(self, call: TrainerCall, write: Callable[[TrainerCall], Any]) -> None:
        call.replace(lambda: self.extended.run_on_writer(call.model, lambda: write(call)))


def _atomically(call: TrainerCall) -> Any:
    path = Path(call.arguments["filepath"])
    atomic_files.remove_partial(path)
    with atomic_files.written(path) as partial:
        call.arguments["filepath"] = str(partial)
        return call.inner()


def _is_one_new_file(given: dict[str, Any]) -> bool:
    """Returns whether a save makes one local file, which can be written under a temporary name first.

    Args:
        given: the arguments of `keras.Model.save` or `keras.Model.save_weights`, by name.
    """
    filepath = given["filepath"]
    if not isinstance(filepath, (str, os.PathLike)) or "://" in str(filepath):
        return False
    path = Path(filepath)
    asks_first = path.exists() and not given["overwrite"]
    is_zipped = given.get("zipped") is not False
    return path.suffix in (".keras", ".h5") and not given.get("max_shard_size") and is_zipped and not asks_first


def _read_for_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has the chief read the weights and broadcast them, so that only the chief needs the file."""

    def load_weights(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        extended = current_strategy.of_model(self, DataParallel)
        if extended is None or extended.broadcasts_loaded_weights:
            return original(self, filepath, *args, **kwargs)
        failure = None
        try:
            extended.run_on_writer(self, lambda: original(self, filepath, *args, **kwargs))
        except Exception as error:
            if not extended.is_writer:
                raise
            failure = error
        failed = tf.constant([int(failure is not None)], tf.int32)
        failed = extended.all_processes.broadcast_once(failed, "whether the chief could load the weights", "int32 (1,)")
        if failure is not None:
            raise failure
        if bool(failed[0]):
            raise OSError(
                f"the chief could not load the weights from {filepath}; see the error of rank "
                f"{extended.all_processes.members[0]} for the cause"
            )
        keras_outer.restore(self, extended, filepath)
        if isinstance(extended, ElasticMembership):
            extended.share_loaded(self)
        else:
            broadcast_state(self, extended)
            keras_accumulation.leave_to_writer(self, extended)
        restore_compression(extended, filepath, self)
        return None

    return load_weights


def _after_the_chief(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has all ranks load a model together under a strategy's scope, after the chief has finished writing."""

    def load_model(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        extended = current_strategy.current(DataParallel)
        if extended is None:
            return original(filepath, *args, **kwargs)
        extended.all_processes.barrier()
        extended.await_file(filepath)
        model = original(filepath, *args, **kwargs)
        extended.all_processes.barrier()  # the chief has loaded the rows of embeddings, too
        keras_accumulation.leave_to_writer(model, extended)
        restore_training_state(model, extended, filepath)
        return model

    return load_model


def save_training_state(model: Any, extended: Ability, path: Any) -> None:
    """Saves training state that is not in a model's file: residuals, and the states of outer optimizers.

    Args:
        model: a Keras model.
        extended: the strategy's `extended`.
        path: path of the model's file.
    """
    compressor = compressor_of(extended)
    if compressor is not None:
        compressor.save(path, weights_of(model))
    keras_outer.save(model, extended, path)


def restore_training_state(model: Any, extended: Ability, path: Any) -> None:
    """Restores the state that `save_training_state` has saved, on all processes.

    Args:
        model: a Keras model.
        extended: the strategy's `extended`.
        path: path of the model's file.

    Raises:
        OSError: this rank's file of residuals is damaged; the other ranks start without residuals.
    """
    keras_outer.restore(model, extended, path)
    restore_compression(extended, path, model)


def weights_of(model: Any) -> Variables:
    """Returns the weights of a model by their keys, frozen or not, in an order that only its layers decide."""
    return {key_of(weight): (weight.path, tuple(weight.shape)) for weight in model.weights}


def compressor_of(extended: Ability) -> Compressor | None:
    """Returns the compressor of a strategy, or None. Each rank saves its own residuals beside the writer's files."""
    return extended.compressor if isinstance(extended, DataParallel) else None


def restore_compression(extended: Ability, path: Any, model: Any = None) -> None:
    """Restores the residuals that were saved beside a checkpoint, if those of all ranks are of the same step.

    Args:
        extended: the strategy's `extended`.
        path: path of the checkpoint.
        model: model whose residuals they are; None for a loop that saves those of all variables.

    Raises:
        OSError: this rank's file is damaged; the other ranks start without residuals.
    """
    if isinstance(extended, DataParallel) and extended.compressor is not None:
        restore_residuals(extended.compressor, extended.exchange, extended.group, path, model)


def restore_residuals(
    compressor: Compressor, exchange: Exchange, group: ProcessGroup, path: Any, model: Any = None
) -> None:
    """Restores residuals like `restore_compression`, without a strategy.

    Args:
        compressor: compressor that takes over the residuals.
        exchange: exchange among the processes of the group.
        group: the processes that train together.
        path: path of the checkpoint.
        model: as for `restore_compression`.

    Raises:
        OSError: this rank's file is damaged; the other ranks start without residuals.
    """
    failure, weights = None, None if model is None else weights_of(model)
    try:
        checksum = compressor.load(path, weights)
    except OSError as error:
        checksum, failure = 0, error
    everyone = exchange.all_gather(tf.constant([checksum], tf.int64)).numpy()
    if everyone.any() and (everyone == everyone[0]).all():
        compressor.adopt()
    elif everyone.any() or failure is not None:
        compressor.forget(weights)
        if group.is_writer:
            missing = [rank for rank, step in zip(group.members, everyone, strict=True) if not step]
            log.warning(
                "tfdist: the residuals of compression saved beside %s are not used, because %s. Training continues "
                "without them: the parts of gradients they held are lost.",
                path,
                f"those of rank(s) {missing} are missing or damaged" if missing else "they are of different steps",
            )
    if failure is not None:
        raise failure
