"""The states of outer optimizers, such as their momentum, which the writer saves beside a model's file."""

from __future__ import annotations

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
from tfdist.strategies.round_abilities import TrainsInRounds

log = logging.getLogger("tfdist")

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
        with written(path) as partial, open(partial, "wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
    else:
        path.unlink(missing_ok=True)  # the states of a model that was saved at this path before


def restore(model: Any, extended: Ability, prefix: Any) -> None:
    """Restores the states that `save` has written; all processes call it. Without a file nothing changes.

    Args:
        model: a Keras model.
        extended: the strategy's `extended`.
        prefix: the path of the model's file; only the writer reads the states beside it.
    """
    if not isinstance(extended, TrainsInRounds):
        return
    everyone, path = extended.all_processes, _file(prefix)
    content = path.read_bytes() if extended.is_writer and "://" not in os.fspath(prefix) and path.exists() else b""
    length = tf.constant([len(content)], tf.int64)
    size = int(everyone.broadcast_once(length, "the size of outer optimizers' states", "int64 (1,)")[0])
    if not size:
        return
    given = tf.constant(np.frombuffer(content, np.uint8) if content else np.zeros(size, np.uint8))
    received = everyone.broadcast_once(given, "outer optimizers' states", f"uint8 ({size},)").numpy()
    try:
        states = _states(received.tobytes())
    except _DAMAGED as error:
        log.warning(
            "tfdist: %s does not contain states of outer optimizers (%s); training continues without them.", path, error
        )
        return
    extended.restore_outer(model, states)


def _file(prefix: Any) -> Path:
    return Path(f"{os.fspath(prefix)}.outer.npz")


def _states(data: bytes) -> list[States]:
    """Returns the saved arrays by number of the optimizer, of its rule, and of the variable."""
    by_optimizer: dict[int, dict[int, dict[int, np.ndarray]]] = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for key in arrays.files:
            number, rule, place = map(int, key.split("/"))
            by_optimizer.setdefault(number, {}).setdefault(rule, {})[place] = arrays[key]
    return [
        [_in_order(rules.get(rule, {})) for rule in range(max(rules, default=-1) + 1)]
        for rules in (by_optimizer.get(number, {}) for number in range(max(by_optimizer, default=-1) + 1))
    ]


def _in_order(state: dict[int, np.ndarray]) -> list[np.ndarray]:
    return [state[place] for place in sorted(state)]
