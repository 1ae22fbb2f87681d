"""Keras weights that no server updates, such as moving statistics: workers begin `fit` with the chief's."""

from __future__ import annotations

import hashlib
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.notices import notice
from tfdist.parameter_server.protocol.messages import CompareState
from tfdist.parameter_server.protocol.programs import CHIEF
from tfdist.parameter_server.protocol.wire import DTYPES
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.layer_states import digest, take
from tfdist.private.models import layers_of
from tfdist.strategies.embeddings.embedded_rows import rows_of
from tfdist.tensors import to_array, unnumbered


class LayerStates:
    """The non-trainable weights of a worker's models, without the state of seed generators.

    Args:
        connect: function that makes a connection to the first server.
        worker: this task's number.
    """

    def __init__(self, connect: Callable[[], Connection], worker: int) -> None:
        self._connect = connect
        self._worker = worker
        self._incarnation = secrets.randbits(63)
        self._begun: list[str] = []
        self._places: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def begin(self, model: Any, updated: Collection[int], again: bool = False) -> None:
        """Takes the chief's non-trainable weights before the first epoch with them; the chief gives its own.

        The chief gives them before each epoch, as the server may have been started again.

        Args:
            model: a Keras model; if its first step builds it, it takes the weights before the second epoch.
            updated: `id`s of variables that servers have updated, which are not assigned.
            again: whether to take the chief's weights also where that was done before, as evaluators do.

        Raises:
            MessageRefusedError: the chief trains another model.
        """
        variables = _variables(model)
        described = tuple(
            f"{unnumbered(variable.path)} {list(variable.shape)} {variable.dtype}" for variable in variables
        )
        name = hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
        ids = tuple(map(id, variables))
        with self._lock:
            places = self._places.setdefault(model, {})
            is_new = ids not in places
            if is_new:
                places[ids] = len(self._begun)
                self._begun.append(name)
        if not is_new and not (variables and (again or self._worker == CHIEF)):
            return
        place = places[ids]
        arrays = [to_array(variable.value.read_value()) for variable in variables]
        digests = tuple(map(digest, arrays))

        def message(id: int, given: Sequence[int]) -> CompareState:
            occurrence = self._begun[:place].count(name)
            return CompareState(
                id, self._worker, self._incarnation, name, occurrence, place, described, digests, tuple(given)
            )

        connection = self._connect()
        try:
            received = take(connection, message, arrays)
        finally:
            connection.close()
        values = [(variables[place], array) for place, array in received.items() if ids[place] not in updated]
        _assign(model, values, is_told=not again)


def _variables(model: Any) -> list[Any]:
    return [
        variable
        for variable in model.non_trainable_weights
        if rows_of(variable) is None and tf.as_dtype(variable.dtype).name in DTYPES
    ]


def _assign(model: Any, values: list[tuple[Any, np.ndarray]], is_told: bool) -> None:
    if not values:
        return
    for variable, value in values:
        variable.assign(value)
    assigned = {id(variable) for variable, _ in values}
    for layer in layers_of(model):
        if hasattr(layer, "finalize_state") and not assigned.isdisjoint(map(id, layer.weights)):
            layer.finalize_state()  # Keras's Normalization computes with constants that it makes of its weights
            for name in ("train", "test", "predict"):
                setattr(model, f"{name}_function", None)
    if is_told:
        model.make_train_function()
        notice(
            "tfdist: %d non-trainable weights, such as %s, differed from the chief's: this worker begins with the "
            "chief's.",
            len(values),
            values[0][0].path,
        )
