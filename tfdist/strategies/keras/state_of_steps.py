"""Non-trainable state of a model in a step on several replicas: moving statistics, counts, metrics.

In a Keras step every replica assigns to its own copy. After the step,

- the state of layers is made equal on all replicas, by the variable's ``aggregation``: ``"sum"`` adds up the changes;
  ``"only_first_replica"`` takes the chief's value; otherwise it is the mean weighted by samples, and for integers the
  chief's value;
- the state of metrics stays separate, and is merged when their results are computed
  (`tfdist.strategies.keras.keras_metrics`). A replica without samples reverts the changes by its stand-in row.

Two kinds of state are not merged: that of seed generators, which is equal on all replicas, as the replica's number is
added only where a seed is used, and that of stateful RNNs, which belongs to the replica's rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.private import models
from tfdist.private import tensorflow as private
from tfdist.strategies.data.shares import Shares, weighed
from tfdist.strategies.keras.keras_assignments import Assigned, copy_of
from tfdist.strategies.keras.keras_variables import state_of_layers
from tfdist.thread_values import ThreadValue

_state: ThreadValue[StateOfStep | None] = ThreadValue(None)
"""State of a thread's step, which is merged over replicas; None outside of steps."""


class StateOfStep:
    """The changes of a replica's step to the state of a model's layers, to be merged over replicas.

    State that is merged as a mean, such as moving statistics, is summed in the same collective as the gradients, if
    that is in the step's own graph and not in a branch: the forward pass has assigned it by then. Other state is merged
    when the step ends.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
        assigned: recorder of the step's assignments.
    """

    def __init__(self, model: Any, extended: Any, assigned: Assigned) -> None:
        self._model = model
        self._shares = extended.shares
        self._assigned = assigned
        self._merged: dict[int, int] = {}
        self._merged_with_gradients: list[Any] = []
        self._has_others = len(extended.worker_devices) > 1
        eager = tf.executing_eagerly()
        self._graph = None if eager or self._has_others else tf.compat.v1.get_default_graph()
        self._variables = state_of_layers(model)
        self._is_local = not extended.synchronizes_steps  # the process may have no samples
        self._before = {
            id(variable): copy_of(variable).read_value()
            for variable in self._variables
            if variable.aggregation == "sum" or self._is_local
        }

    def under_way(self) -> contextlib.AbstractContextManager[None]:
        """Context of the step, in the calling thread."""
        return _state.set_to(self)

    def others_called(self) -> contextlib.AbstractContextManager[None]:
        """Context in which other devices' replicas may take this step; afterwards layers have their losses again."""
        return models.losses_kept(self._model) if self._has_others else contextlib.nullcontext()

    def means(self, weighs: bool) -> list[tf.Tensor]:
        """Returns this replica's terms of the state that is merged with gradients; `take` gets their sums.

        Args:
            weighs: whether to weight the terms by samples; if not, the reduction does so.
        """
        if self._is_local or self._graph is None or tf.compat.v1.get_default_graph() is not self._graph:
            return []
        counts = self._assignments()
        self._merged_with_gradients = [
            variable
            for variable in self._variables
            if _is_mean(variable) and counts.get(id(variable)) != self._merged.get(id(variable))
        ]
        self._merged.update({id(variable): counts[id(variable)] for variable in self._merged_with_gradients})
        return [_term(variable, self._shares.weight() if weighs else None) for variable in self._merged_with_gradients]

    def take(self, sums: Sequence[tf.Tensor]) -> None:
        """Assigns the merged values to the state.

        Args:
            sums: sums over all replicas of the terms that `means` returned.
        """
        for variable, total in zip(self._merged_with_gradients, sums, strict=True):
            copy = copy_of(variable)
            copy.assign(tf.cast(total, copy.dtype), read_value=False)

    def _assignments(self) -> dict[int, int]:
        """Returns how often the function that is being traced has assigned to each variable, by id."""
        return {key: len(values) for key, values in self._assigned.values.items()}

    def merge(self) -> None:
        """Makes the state that the step has assigned equal on all replicas, which all call this."""
        counts = self._assignments()
        merged = {key for key, count in self._merged.items() if count == counts[key]}
        changed = [
            variable
            for variable in self._assigned.among(self._variables)
            if _is_numeric(variable) and id(variable) not in merged
        ]
        if not changed:
            return
        replica = tf.distribute.get_replica_context()
        parts = [self._contribution(variable) for variable in changed]
        sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, parts, private.WeighedOptions())
        for variable, total in zip(changed, sums, strict=True):
            copy = copy_of(variable)
            if variable.aggregation == "sum":
                before = _as_number(self._before[id(variable)])
                total = before + tf.cast(total, before.dtype)
            new = tf.cast(total, copy.dtype)
            if self._is_local:
                new = tf.where(self._shares.total() > 0, new, self._before[id(variable)])
            copy.assign(new, read_value=False)

    def _contribution(self, variable: Any) -> tf.Tensor:
        shares = self._shares
        if _is_mean(variable):
            return _term(variable, shares.weight())
        value = _as_number(copy_of(variable).read_value())
        if variable.aggregation == "sum":
            change = value - _as_number(self._before[id(variable)])
            return tf.where(shares.is_empty(), tf.zeros_like(change), change)
        replica = tf.distribute.get_replica_context()
        place = private.local_replica_id() if self._is_local else replica.replica_id_in_sync_group
        return tf.where(tf.equal(place, 0), value, tf.zeros_like(value))


def state_of_step() -> StateOfStep | None:
    """Returns the state of the step that the calling thread takes; None outside of steps."""
    return _state.value


def _is_mean(variable: Any) -> bool:
    """Returns whether state is merged as the mean weighted by samples."""
    is_floating = variable.dtype.startswith(("float", "bfloat"))
    return is_floating and variable.aggregation not in ("sum", "only_first_replica")


def _term(variable: Any, weight: tf.Tensor | None) -> tf.Tensor:
    """Returns this replica's term of the mean of a variable, multiplied by the weight if one is given."""
    value = copy_of(variable).read_value()
    if value.dtype.size < 4:
        value = tf.cast(value, tf.float32)
    return value if weight is None else weighed(value, weight)


class StateOfMetrics:
    """The changes of a replica's step to metrics, to be reverted if the replica has no samples.

    Args:
        variables: the metrics' variables.
        shares: the step's shares.
    """

    def __init__(self, variables: list[Any], shares: Shares) -> None:
        self._shares = shares
        self._variables = variables
        self._before = {id(variable): copy_of(variable).read_value() for variable in variables}

    def forget_stand_in(self, assigned: Assigned) -> None:
        """Reverts the assignments, if the calling replica has no samples."""
        changed = assigned.among(self._variables)
        if not changed:
            return

        def revert() -> tf.Operation:
            for variable in changed:
                copy_of(variable).assign(self._before[id(variable)], read_value=False)
            return tf.no_op()

        tf.cond(self._shares.is_empty(), revert, tf.no_op)


def _as_number(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int32) if value.dtype.is_bool else value


def _is_numeric(variable: Any) -> bool:
    return variable.dtype != "string"
