"""Saving and loading when several processes run the same script: one writes, one reads for all."""

from __future__ import annotations

import functools
import glob
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.compressor import Compressor
from tfdist.strategies import at_work
from tfdist.strategies.abilities import Ability, LoadsForAll, ReducesGradients, WritesOnce
from tfdist.strategies.keras_private import saving_api
from tfdist.strategies.keras_variables import broadcast_state

log = logging.getLogger("tfdist")


def install(replace: Callable[..., None]) -> None:
    """Puts the seams of saving in place.

    Args:
        replace: puts one function in the place of another.
    """
    replace(keras.Model, "save", functools.partial(_written_once, whole=True))
    replace(keras.Model, "save_weights", functools.partial(_written_once, whole=True))
    replace(keras.Model, "export", functools.partial(_written_once, whole=False))
    replace(keras.Model, "load_weights", _read_for_all)
    for owner in (keras.models, keras.saving):
        replace(owner, "load_model", _after_the_chief)
        replace(owner, "save_model", _saved_by_method)
    saving_api.load_model = keras.saving.load_model


def _saved_by_method(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if at_work.of_model(model, WritesOnce) is None:
            return original(model, *args, **kwargs)
        return model.save(*args, **kwargs)

    return save_model


def _written_once(original: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """One process writes, without the others; a file appears whole, under its name, or not at all."""

    def method(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.of_model(self, WritesOnce)
        if extended is None:
            return original(self, filepath, *args, **kwargs)
        compressor = compressor_of(extended)
        if whole and compressor is not None:
            compressor.save(filepath)
        if not extended.is_writer:
            return None
        with extended.local_only():
            if not whole or not _is_one_new_file(filepath, args, kwargs):
                return original(self, filepath, *args, **kwargs)
            path = Path(filepath)
            remove_partial(path)
            partial = partial_name(path)
            try:
                result = original(self, str(partial), *args, **kwargs)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            return result

    return method


def partial_name(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f".{uuid.uuid4().hex[:8]}.{path.name}")


def remove_partial(path: Path) -> None:
    """Removes what a process that was killed while it wrote this file has left."""
    for left in path.parent.glob(f".????????.{glob.escape(path.name)}"):
        left.unlink(missing_ok=True)


def _is_one_new_file(filepath: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a save makes one local file, which may be written under another name first."""
    if not isinstance(filepath, (str, os.PathLike)) or "://" in str(filepath):
        return False
    path = Path(filepath)
    asks_first = path.exists() and not (args[0] if args else kwargs.get("overwrite", True))
    return path.suffix in (".keras", ".h5") and not kwargs.get("max_shard_size") and len(args) < 2 and not asks_first


def _read_for_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """The chief reads the weights, and every rank gets them; also where only the chief has the file."""

    def load_weights(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.of_model(self, LoadsForAll)
        if extended is None or extended.is_reading_for_all:
            return original(self, filepath, *args, **kwargs)
        failure = None
        if extended.group.is_writer:
            try:
                with extended.local_only():
                    original(self, filepath, *args, **kwargs)
            except Exception as error:
                failure = error
        failed = tf.constant([int(failure is not None)], tf.int32)
        failed = extended.exchange.broadcast_once(failed, "whether the chief could load the weights", "int32 (1,)")
        if failure is not None:
            raise failure
        if bool(failed[0]):
            raise OSError(f"the chief could not load the weights from {filepath}; its own error says why")
        broadcast_state(self, extended)
        restore_compression(extended, filepath)
        return None

    return load_weights


def _after_the_chief(original: Callable[..., Any]) -> Callable[..., Any]:
    """Under a strategy's scope all ranks load together, after the chief has written what they load."""

    def load_model(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.current(LoadsForAll)
        if extended is None:
            return original(filepath, *args, **kwargs)
        extended.bridge.all_reduce([tf.constant([1], tf.int32)])
        model = original(filepath, *args, **kwargs)
        restore_compression(extended, filepath)
        return model

    return load_model


def compressor_of(extended: Ability) -> Compressor | None:
    """What knows the residuals of a strategy, if it has any: each rank saves its own, beside what the writer saves."""
    return extended.compressor if isinstance(extended, ReducesGradients) else None


def restore_compression(extended: Ability, path: Any) -> None:
    """Goes on with the residuals that were saved beside a checkpoint, if those of all ranks are of the same step.

    Args:
        extended: of the strategy.
        path: of the checkpoint.

    Raises:
        OSError: this rank's file is damaged; the other ranks begin anew.
    """
    if not isinstance(extended, ReducesGradients) or extended.compressor is None:
        return
    compressor = extended.compressor
    failure = None
    try:
        found = compressor.load(path)
    except OSError as error:
        found, failure = 0, error
    everyone = extended.exchange.all_gather(tf.constant([found], tf.int64)).numpy()
    if everyone.any() and (everyone == everyone[0]).all():
        compressor.adopt()
    elif everyone.any() or failure is not None:
        compressor.forget()
        if extended.group.is_writer:
            missing = [rank for rank, step in enumerate(everyone) if not step]
            log.warning(
                "tfdist: the residuals of compression saved beside %s are not used, as %s. What had not been sent is "
                "lost; training goes on.",
                path,
                f"those of rank(s) {missing} are missing" if missing else "they are of different steps",
            )
    if failure is not None:
        raise failure
