"""Non-trainable state of a model on several replicas: moving statistics, counts, metrics.

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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.private import models
from tfdist.private import tensorflow as private
from tfdist.private.keras import tf_core
from tfdist.private.models import layers_of, state_of, strategy_of, value_of
from tfdist.private.optimizers import strategy_of as strategy_of_optimizer
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.abilities import Ability, DataParallel
from tfdist.strategies.data.shares import Shares, weighed
from tfdist.strategies.divided_abilities import DividesUpdates
from tfdist.strategies.server_abilities import UpdatesOnServers
from tfdist.tensors import unnumbered
from tfdist.thread_values import ThreadValue

_assigned: ThreadValue[Assigned | None] = ThreadValue(None)
"""Recorder of the assignments of a thread's step; None if they are not recorded."""
_state: ThreadValue[StateOfStep | None] = ThreadValue(None)
"""State of a thread's step, which is merged over replicas; None outside of steps."""


def install() -> None:
    """Installs the seams for assignments, and the hook that makes state equal before `evaluate`."""
    replace(tf_core.Variable, "_direct_assign", _to_the_own_copy)
    replace(tf_core.Variable, "_map_aggregation", _readable)
    keras_hooks.add(EqualState)


def check_scope(model: Any) -> None:
    """Checks that all state was made in the strategy's scope: other state would silently differ between processes.

    Args:
        model: a Keras model, built under a strategy whose replicas have copies of its variables.

    Raises:
        ValueError: a variable or the optimizer was made outside the scope.
    """
    extended = current_strategy.of_model(model, Ability)
    outside = [
        variable.path
        for variable in (*model.variables, *model.metrics_variables)
        if (extended is None or extended.holds(model, variable)) and not private.is_distributed_variable(variable.value)
    ]
    optimizer = getattr(model, "optimizer", None)
    strategy = strategy_of_optimizer(optimizer, model.distribute_strategy)
    if optimizer is not None and strategy is not model.distribute_strategy:
        outside.append(f"the optimizer {optimizer.name}")
    if outside:
        raise ValueError(
            f"created outside of strategy.scope(): {', '.join(outside[:5])}{', …' if len(outside) > 5 else ''}. Create "
            "the model, and the optimizer and metrics passed to `compile`, inside `with strategy.scope():`, and call "
            "`adapt` and `build` there; otherwise their values would differ between processes."
        )


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


def state_of_layers(model: Any) -> list[Any]:
    """Returns the variables of a model's layers that were created non-trainable, and that this process holds.

    Frozen weights are not among them, nor metrics.
    """
    extended = current_strategy.of_model(model, Ability)
    return [
        variable
        for layer in layers_of(model)
        for variable in state_of(layer)
        if variable.synchronization != "on_read" and (extended is None or extended.holds(model, variable))
    ]


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


# Outside of steps.


def broadcast_state(model: Any, extended: DataParallel) -> None:
    """Gives every process the chief's weights and the state of its optimizers."""
    if isinstance(extended, DividesUpdates):
        extended.equalize(model)
    else:
        broadcast(model, extended)


def broadcast(model: Any, extended: DataParallel, without: Container[int] = ()) -> None:
    """Gives every process the chief's values of a model's weights and of its optimizers' variables.

    Args:
        model: a Keras model.
        extended: the strategy's `extended`.
        without: variables that are left out, by their `id`.
    """
    variables = list(model.variables)
    for optimizer in optimizers(model):
        variables += optimizer.variables
    seen: set[int] = set()
    for variable in variables:
        if id(variable) in seen or id(variable) in without or getattr(variable, "synchronization", None) == "on_read":
            continue
        value = tf.convert_to_tensor(variable.value)
        key = f"the state of {unnumbered(variable.path)} #{len(seen)} {value.dtype.name} {value.shape}"
        seen.add(id(variable))
        variable.assign(extended.exchange.broadcast_once(value, key, f"{value.dtype.name} {value.shape}"))


def optimizers(model: Any) -> list[Any]:
    """Returns all optimizers that Keras saves with a model, not only that of `compile`: a GAN may have two."""
    attributes = _flattened(vars(layer) for layer in layers_of(model))
    return [attribute for attribute in attributes if isinstance(attribute, keras.optimizers.Optimizer)]


def level_counts(model: Any) -> None:
    """Gives an optimizer's ``iterations``, states of seeds, and other integers the value that the first device has.

    To be called after a step that ended with an error, as the last one does where the number of batches is unknown.
    It updates no weights, but counts itself without waiting for data, as in plain Keras: always on the first device,
    and on others by chance.
    """
    for variable in (*model.variables, *(one for optimizer in optimizers(model) for one in optimizer.variables)):
        if keras.backend.is_int_dtype(variable.dtype) and variable.synchronization != "on_read":
            first, *others = private.copies(value_of(variable))
            for copy in others:
                copy.assign(first.read_value(), read_value=False)


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the contents of nested lists, tuples and dictionaries; their keys need no order, unlike `tree.flatten`."""
    for value in values:
        if isinstance(value, dict):
            yield from _flattened(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _flattened(value)
        else:
            yield value


class EqualState(keras_hooks.ModelHooks[DataParallel]):
    """The hook that makes layers' state equal before `evaluate`: `fit` does so, but a custom loop may not."""

    ability = DataParallel

    def evaluate(self, call: TrainerCall) -> None:
        """Averages layers' state over replicas."""
        if self.extended.has_several_replicas and not call.is_within_fit:
            average_state(call.model, self.extended)


def average_state(model: Any, extended: DataParallel) -> None:
    """Makes the state of layers equal on all replicas after a custom training loop.

    Each element becomes the mean over all replicas in which it is finite; integers are not changed.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    variables = [variable for variable in state_of_layers(model) if variable.dtype.startswith(("float", "bfloat"))]
    if not variables:
        return
    sums = []
    for variable in variables:
        parts = [tf.cast(copy.read_value(), tf.float64) for copy in private.copies(value_of(variable))]
        finite = [tf.math.is_finite(part) for part in parts]
        sums.append(tf.add_n([tf.where(known, part, 0.0) for known, part in zip(finite, parts, strict=True)]))
        sums.append(tf.add_n([tf.cast(known, tf.float64) for known in finite]))
    sums = extended.bridge.all_reduce(sums)
    for variable, total, count in zip(variables, sums[::2], sums[1::2], strict=True):
        local_value = tf.cast(private.copies(value_of(variable))[0].read_value(), tf.float64)
        mean = tf.where(count > 0, tf.math.divide_no_nan(total, count), local_value)
        variable.assign(tf.cast(mean, variable.dtype))
