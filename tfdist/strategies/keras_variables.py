"""State of a model that is no weight to be trained, under several replicas: moving statistics, counts, metrics.

In a step of Keras's every replica assigns to its own copy. After it,

- what a layer keeps is made equal on all replicas, by the variable's ``aggregation``: ``"sum"`` adds up the changes;
  ``"only_first_replica"`` takes the chief's; otherwise it is the mean weighed by samples, of integers the chief's;
- what metrics keep stays apart, and is merged when their results are asked for (`tfdist.strategies.keras_metrics`);
  a replica without samples takes back what its stand-in row has changed.

Left alone are the state of seed generators, which differs between replicas on purpose, and that of stateful RNNs,
which is of the rows that the replica has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.strategies import at_work
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.abilities import AveragesState, LoadsForAll, MergesMetrics
from tfdist.strategies.keras_private import tf_core
from tfdist.strategies.shares import Shares, weighed

_calling = threading.local()


def install(replace: Callable[..., None]) -> None:
    """Puts the seam of assignments in place.

    Args:
        replace: puts one function in the place of another.
    """
    replace(tf_core.Variable, "_direct_assign", _to_the_own_copy)
    replace(tf_core.Variable, "_map_aggregation", _readable)


def check_scope(model: Any) -> None:
    """State that was made outside of the scope is this process's alone, and nothing would tell.

    Args:
        model: of Keras, built under a strategy whose replicas have copies of its variables.

    Raises:
        ValueError: a variable or the optimizer was made outside.
    """
    outside = [
        variable.path
        for variable in (*model.variables, *model.metrics_variables)
        if not private.is_distributed_variable(variable.value)
    ]
    optimizer = getattr(model, "optimizer", None)
    strategy = getattr(optimizer, "_distribution_strategy", model.distribute_strategy)
    if optimizer is not None and strategy is not model.distribute_strategy:
        outside.append(f"the optimizer {optimizer.name}")
    if outside:
        raise ValueError(
            f"created outside of strategy.scope(): {', '.join(outside[:5])}{', …' if len(outside) > 5 else ''}. Make "
            "the model, and the optimizer and the metrics that `compile` is given, inside `with strategy.scope():`, or "
            "their values would differ between processes."
        )


class Assigned:
    """The variables that a step assigns to, in the order in which it was first seen to.

    It keeps them: a function that was traced before assigns without being seen.

    Attributes:
        values: that were assigned, by the ids of the variables.
    """

    def __init__(self) -> None:
        self._variables: dict[int, Any] = {}
        self.values: dict[int, list[Any]] = {}

    def note(self, variable: Any, value: Any) -> None:
        """Notes an assignment."""
        _calling.reported = None
        self._variables.setdefault(id(variable), variable)
        self.values.setdefault(id(variable), []).append(value)

    def among(self, variables: Any) -> list[Any]:
        """Those of the variables that are assigned to."""
        ids = {id(variable) for variable in variables}
        return [variable for key, variable in self._variables.items() if key in ids]

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what the calling thread assigns inside."""
        before = getattr(_calling, "assigned", None)
        _calling.assigned, _calling.reported = self, None
        try:
            yield
        finally:
            _calling.assigned = before


def report(results: Any) -> None:
    """Notes what `get_metrics_result` returns to a step."""
    _calling.reported = results


def is_report(outputs: Any) -> bool:
    """Whether a step returns what `get_metrics_result` has returned to it, with nothing assigned since."""
    return outputs is not None and outputs is getattr(_calling, "reported", None)


def _to_the_own_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a replica assigns goes to its own copy, without TensorFlow's aggregation, which knows no samples."""

    def _direct_assign(self: Any, value: Any) -> None:
        assigned = getattr(_calling, "assigned", None)
        if assigned is None or at_work.sharing() is None:
            if not _assigned_to_all_copies(self, value):
                original(self, value)
            return
        assigned.note(self, value)
        if self.synchronization != "on_read" and at_work.current(AveragesState) is None:
            original(self, value)
            return
        copy_of(self).assign(tf.cast(value, self._value.dtype), read_value=False)

    return _direct_assign


MERGED_BY = "_tfdist_merged_by"
"""The attribute of a metric's variable that says how it is merged, where a step has told better than its metric."""

_WHOLE = "_tfdist_whole"
"""The attribute of a metric's variable that keeps the value of which each replica has its part."""


class Changes:
    """Counts the assignments to metrics outside of steps.

    Attributes:
        count: so far.
    """

    count = 0


def _assigned_to_all_copies(variable: Any, value: Any) -> bool:
    """Assigns to a metric's variable what its parts make up, as TensorFlow does, but without reading it everywhere.

    Returns:
        Whether this is a variable of a metric, of a strategy that merges them, outside of replicas.
    """
    in_a_replica = tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None
    if in_a_replica or variable.synchronization != "on_read" or not private.is_distributed_variable(variable._value):
        return False
    if at_work.of_strategy(variable._value._distribute_strategy, MergesMetrics) is None:
        return False
    Changes.count += 1
    parts = 1
    if variable.aggregation in ("sum", "none") and getattr(variable, MERGED_BY, "sum") == "sum":
        parts = variable._value._distribute_strategy.num_replicas_in_sync
        if tf.executing_eagerly():
            setattr(variable, _WHOLE, value)
    _assign_copies(variable, value if parts == 1 else value / parts)
    return True


def _assign_copies(variable: Any, value: Any) -> None:
    for copy in private.copies(variable._value):
        copy.assign(tf.cast(value, copy.dtype), read_value=False)


def merge_by_extreme(variable: Any, kind: str) -> None:
    """Has a metric's variable merged by its maximum or minimum; what was assigned before the step is no sum then.

    Args:
        variable: of a metric.
        kind: "max" or "min".
    """
    setattr(variable, MERGED_BY, kind)
    if hasattr(variable, _WHOLE):
        with tf.init_scope():
            _assign_copies(variable, getattr(variable, _WHOLE))


def _readable(original: Callable[..., Any]) -> Callable[..., Any]:
    """A metric's variable that says "none" can be read while Keras builds; tfdist merges it by what Keras knows."""

    def _map_aggregation(self: Any, aggregation: str) -> Any:
        if aggregation == "none" and self.synchronization == "on_read" and at_work.current(MergesMetrics) is not None:
            aggregation = "sum"
        return original(self, aggregation)

    return _map_aggregation


def copy_of(variable: Any) -> Any:
    """The calling replica's copy of a Keras variable, a `tf.Variable`."""
    copies = private.copies(variable._value)
    return copies[private.local_replica_id() if len(copies) > 1 else 0]


def state_of_layers(model: Any) -> list[Any]:
    """The variables that were made not to be trained, of all layers of a model; not frozen weights, nor metrics."""
    return [
        variable
        for layer in model._flatten_layers()
        for variable in layer._non_trainable_variables
        if variable.synchronization != "on_read"
    ]


class StateOfStep:
    """What a replica's step does to the state of a model's layers, and how the replicas come together again.

    Args:
        model: of Keras.
        shares: of the step.
    """

    def __init__(self, model: Any, shares: Shares) -> None:
        self._shares = shares
        self._variables = state_of_layers(model)
        self._before = {
            id(variable): copy_of(variable).read_value()
            for variable in self._variables
            if variable.aggregation == "sum"
        }

    def merge(self, assigned: Assigned) -> None:
        """Makes the state that was assigned to equal on all replicas. Called by every replica."""
        changed = [variable for variable in assigned.among(self._variables) if _is_numeric(variable)]
        if not changed:
            return
        replica = tf.distribute.get_replica_context()
        parts = [self._contribution(variable) for variable in changed]
        sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, parts, private.WeighedOptions())
        for variable, total in zip(changed, sums, strict=True):
            copy = copy_of(variable)
            if variable.aggregation == "sum":
                total = self._before[id(variable)] + tf.cast(total, copy.dtype)
            copy.assign(tf.cast(total, copy.dtype), read_value=False)

    def _contribution(self, variable: Any) -> tf.Tensor:
        shares = self._shares
        value = copy_of(variable).read_value()
        if value.dtype.is_bool:
            value = tf.cast(value, tf.int32)
        if variable.aggregation == "sum":
            change = value - self._before[id(variable)]
            return tf.where(shares.is_empty(), tf.zeros_like(change), change)
        if variable.aggregation == "only_first_replica" or not value.dtype.is_floating:
            is_first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
            return tf.where(is_first, value, tf.zeros_like(value))
        if value.dtype.size < 4:
            value = tf.cast(value, tf.float32)
        return weighed(value, shares.weight())


class StateOfMetrics:
    """What a replica's step does to metrics, to be taken back where the replica has no samples.

    Args:
        variables: of the metrics.
        shares: of the step.
    """

    def __init__(self, variables: list[Any], shares: Shares) -> None:
        self._shares = shares
        self._variables = variables
        self._before = {id(variable): copy_of(variable).read_value() for variable in variables}

    def forget_stand_in(self, assigned: Assigned) -> None:
        """Takes back what was assigned, if the calling replica has no samples."""
        changed = assigned.among(self._variables)
        if not changed:
            return

        def take_back() -> tf.Operation:
            for variable in changed:
                copy_of(variable).assign(self._before[id(variable)], read_value=False)
            return tf.no_op()

        tf.cond(self._shares.is_empty(), take_back, tf.no_op)


def _is_numeric(variable: Any) -> bool:
    return variable.dtype != "string"


# Outside of steps.


def broadcast_state(model: Any, extended: LoadsForAll) -> None:
    """Gives every process the chief's weights and optimizer state."""
    variables = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables
    seen: set[int] = set()
    for variable in variables:
        if id(variable) in seen or getattr(variable, "synchronization", None) == "on_read":
            continue
        seen.add(id(variable))
        value = tf.convert_to_tensor(variable.value)
        key = f"the state of {variable.path} {value.dtype.name} {value.shape}"
        variable.assign(extended.exchange.broadcast_once(value, key, f"{value.dtype.name} {value.shape}"))


def average_state(model: Any, extended: AveragesState) -> None:
    """Makes the state of layers equal that a hand-written loop has left different on every replica.

    It becomes the mean over all replicas that have a finite value; of integers nothing is changed.

    Args:
        model: of Keras.
        extended: of its strategy.
    """
    variables = [variable for variable in state_of_layers(model) if variable.dtype.startswith(("float", "bfloat"))]
    if not variables:
        return
    sums = []
    for variable in variables:
        parts = [tf.cast(copy.read_value(), tf.float64) for copy in private.copies(variable._value)]
        finite = [tf.math.is_finite(part) for part in parts]
        sums.append(tf.add_n([tf.where(known, part, 0.0) for known, part in zip(finite, parts, strict=True)]))
        sums.append(tf.add_n([tf.cast(known, tf.float64) for known in finite]))
    sums = extended.bridge.all_reduce(sums)
    for variable, total, count in zip(variables, sums[::2], sums[1::2], strict=True):
        own = tf.cast(private.copies(variable._value)[0].read_value(), tf.float64)
        mean = tf.where(count > 0, tf.math.divide_no_nan(total, count), own)
        variable.assign(tf.cast(mean, variable.dtype))
