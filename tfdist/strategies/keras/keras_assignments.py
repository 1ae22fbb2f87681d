"""Assignments to Keras variables: within a step each replica assigns to its own copy, and they are on record.

Values that a program assigns to a metric's variable outside of replicas are divided among the copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.private import tensorflow as private
from tfdist.private.keras import tf_core
from tfdist.private.models import strategy_of, value_of
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import Ability, DataParallel
from tfdist.strategies.server_abilities import UpdatesOnServers
from tfdist.thread_values import ThreadValue

_assigned: ThreadValue[Assigned | None] = ThreadValue(None)
"""Recorder of the assignments of a thread's step; None if they are not recorded."""


def install() -> None:
    """Installs the seams."""
    replace(tf_core.Variable, "_direct_assign", _to_the_own_copy)
    replace(tf_core.Variable, "_map_aggregation", _readable)


class Assigned:
    """A record of the variables that a step assigns to, in the order of their first recorded assignment.

    Variables are kept between calls, because assignments in a function that was traced before are not recorded.

    Attributes:
        values: the assigned values, by the ids of the variables.
    """

    def __init__(self) -> None:
        self._variables: dict[int, Any] = {}
        self.values: dict[int, list[Any]] = {}

    def note(self, variable: Any, value: Any) -> None:
        """Records an assignment of a value."""
        self._variables.setdefault(id(variable), variable)
        self.values.setdefault(id(variable), []).append(value)

    def among(self, variables: Any) -> list[Any]:
        """Returns those of ``variables`` that the step assigns to."""
        ids = {id(variable) for variable in variables}
        return [variable for key, variable in self._variables.items() if key in ids]

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """Context that records the calling thread's assignments."""
        return _assigned.set_to(self)


def unnoted() -> contextlib.AbstractContextManager[None]:
    """Context in which the calling thread's assignments are not recorded."""
    return _assigned.set_to(None)


def note_origin(variable: Any, value: Any) -> None:
    """Replaces the recorded value of a variable's last assignment by the tensor that it comes from.

    Args:
        variable: a Keras variable.
        value: the assigned value, as a tensor in the graph of the compiled function that computes it.
    """
    assigned = _assigned.value
    if assigned is not None and id(variable) in assigned.values:
        assigned.values[id(variable)][-1] = value


def _to_the_own_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Assigns to the replica's own copy, without TensorFlow's aggregation, which does not weight by samples."""

    def _direct_assign(self: Any, value: Any) -> None:
        assigned = _assigned.value
        if assigned is None or current_strategy.sharing() is None:
            if assigned is not None and current_strategy.current(UpdatesOnServers) is not None:
                assigned.note(self, value)
            if not _assigned_to_all_copies(self, value):
                original(self, value)
                _note_assignment_of_the_user(self)
            return
        assigned.note(self, value)
        if self.synchronization != "on_read" and current_strategy.current(DataParallel) is None:
            original(self, value)
            return
        copy_of(self).assign(tf.cast(value, self._value.dtype), read_value=False)

    return _direct_assign


def _note_assignment_of_the_user(variable: Any) -> None:
    if tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None:
        return
    extended = current_strategy.of_strategy(strategy_of(value_of(variable)), Ability)
    if extended is not None and tf.executing_eagerly():
        extended.assigned(variable)


MERGED_BY = "_tfdist_merged_by"
"""Attribute of a metric's variable: its rule for merging, if a step shows that the ``aggregation`` does not apply."""

_WHOLE = "_tfdist_whole"
"""Attribute of a metric's variable: the last assigned value, before its division among the replicas."""


def _assigned_to_all_copies(variable: Any, value: Any) -> bool:
    """Divides a value among the copies of a metric's variable, as TensorFlow does, but without reading them back.

    Returns:
        Whether the value was assigned. It is if the variable belongs to a metric under a strategy that merges metrics,
        and the caller is outside of replicas.
    """
    in_a_replica = tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None
    if in_a_replica or variable.synchronization != "on_read" or not private.is_distributed_variable(value_of(variable)):
        return False
    if current_strategy.of_strategy(strategy_of(value_of(variable)), DataParallel) is None:
        return False
    parts = 1
    if variable.aggregation in ("sum", "none") and getattr(variable, MERGED_BY, "sum") == "sum":
        parts = strategy_of(value_of(variable)).num_replicas_in_sync
        if tf.executing_eagerly():
            setattr(variable, _WHOLE, value)
    _assign_copies(variable, value if parts == 1 else value / parts)
    return True


def _assign_copies(variable: Any, value: Any) -> None:
    for copy in private.copies(value_of(variable)):
        copy.assign(tf.cast(value, copy.dtype), read_value=False)


def merge_by_extreme(variable: Any, kind: str) -> None:
    """Makes a metric's variable merge by maximum or minimum, and undoes the division of its initial value.

    Args:
        variable: a metric's variable.
        kind: "max" or "min".
    """
    setattr(variable, MERGED_BY, kind)
    if hasattr(variable, _WHOLE):
        with tf.init_scope():
            _assign_copies(variable, getattr(variable, _WHOLE))


def _readable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets metric variables with the aggregation "none" be read while Keras builds; tfdist merges them itself."""

    def _map_aggregation(self: Any, aggregation: str) -> Any:
        if (
            aggregation == "none"
            and self.synchronization == "on_read"
            and current_strategy.current(DataParallel) is not None
        ):
            aggregation = "sum"
        return original(self, aggregation)

    return _map_aggregation


def copy_of(variable: Any) -> Any:
    """Returns the calling replica's copy of a Keras variable, a `tf.Variable`."""
    copies = private.copies(value_of(variable))
    return copies[private.local_replica_id() if len(copies) > 1 else 0]
