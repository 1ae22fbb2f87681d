"""The states of outer optimizers, such as their momentum, which the writer saves beside a model's file."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.local_sgd.rules import States
from tfdist.strategies.abilities import Ability
from tfdist.strategies.atomic_files import written
from tfdist.strategies.keras.keras_comparison import checksum
from tfdist.strategies.round_abilities import TrainsInRounds

log = logging.getLogger("tfdist")

_WEIGHTS = "weights"
"""Name of the digest of the weights that the states were saved with."""
_DAMAGED = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile)


def save(model: Any, extended: Ability, prefix: Any) -> None:
    """Writes the states of a model's outer optimizers, on the writer, if they have any.

    Args:
        model: a Keras model.
        extended: the strategy's `extended`.
        prefix: the path of the model's file.
    """
    if not isinstance(extended, TrainsInRounds) or not extended.is_writer:
        return
    if "://" in os.fspath(prefix):
        return  # remote paths get no residuals either
    arrays = {
        f"{number}/{rule}/{place}": array
        for number, rules in enumerate(extended.outer_states(model))
        for rule, state in enumerate(rules)
        for place, array in enumerate(state)
    }
    path = _file(prefix)
    if arrays:
        arrays[_WEIGHTS] = _digest(model)
        with written(path) as partial, open(partial, "wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
    else:
        path.unlink(missing_ok=True)  # the states of a model that was saved at this path before


def restore(model: Any, extended: Ability, prefix: Any) -> None:
    """Restores the states that `save` has written; all processes call it.

    Without a file of them, or with one that was written beside other weights, outer optimizers begin anew.

    Args:
        model: a Keras model that has the weights of its file.
        extended: the strategy's `extended`.
        prefix: the path of the model's file; only the writer reads the states beside it.
    """
    if not isinstance(extended, TrainsInRounds):
        return
    everyone, path = extended.all_processes, _file(prefix)
    content = b""
    if extended.is_writer and "://" not in os.fspath(prefix) and path.exists():
        content = _unless_of_other_weights(path, model)
    length = tf.constant([len(content)], tf.int64)
    size = int(everyone.broadcast_once(length, "the size of outer optimizers' states", "int64 (1,)")[0])
    if not size:
        extended.restore_outer(model, [])
        return
    given = tf.constant(np.frombuffer(content, np.uint8) if content else np.zeros(size, np.uint8))
    received = everyone.broadcast_once(given, "outer optimizers' states", f"uint8 ({size},)").numpy()
    try:
        states = _states(received.tobytes())
    except _DAMAGED as error:
        log.warning(
            "tfdist: %s does not contain states of outer optimizers (%s); training continues without them.", path, error
        )
        states = []
    extended.restore_outer(model, states)


def _file(prefix: Any) -> Path:
    return Path(f"{os.fspath(prefix)}.outer.npz")


def _unless_of_other_weights(path: Path, model: Any) -> bytes:
    """Returns a file's content; empty, with a warning, if it was written beside other weights than the model's."""
    content = path.read_bytes()
    with contextlib.suppress(*_DAMAGED), np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        if _WEIGHTS in arrays.files and not np.array_equal(arrays[_WEIGHTS], _digest(model)):
            log.warning("tfdist: %s belongs to other weights than were loaded: outer optimizers begin anew.", path)
            return b""
    return content


def _digest(model: Any) -> np.ndarray:
    """Returns a number that differs for other weights, int64 ``()``."""
    return np.array(sum(checksum(weight) for weight in model.get_weights()))


def _states(data: bytes) -> list[States]:
    """Returns the saved arrays by number of the optimizer, of its rule, and of the variable."""
    by_optimizer: dict[int, dict[int, dict[int, np.ndarray]]] = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for key in set(arrays.files) - {_WEIGHTS}:
            number, rule, place = map(int, key.split("/"))
            by_optimizer.setdefault(number, {}).setdefault(rule, {})[place] = arrays[key]
    return [
        [_in_order(rules.get(rule, {})) for rule in range(max(rules, default=-1) + 1)]
        for rules in (by_optimizer.get(number, {}) for number in range(max(by_optimizer, default=-1) + 1))
    ]


def _in_order(state: dict[int, np.ndarray]) -> list[np.ndarray]:
    return [state[place] for place in sorted(state)]
