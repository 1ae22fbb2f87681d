"""Metrics over all replicas: each replica keeps its own state, which is merged when results are computed.

State is merged by the variable's ``aggregation``, which is ``"sum"`` unless a metric sets another. If a step updates a
variable to the maximum or minimum of its value and another one, copies are merged by maximum or minimum instead. A
variable with ``"none"`` that is updated in any other way cannot be merged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.private import models
from tfdist.private import tensorflow as private
from tfdist.private.keras import backend, base_trainer, tree
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras.keras_assignments import MERGED_BY, merge_by_extreme

log = logging.getLogger("tfdist")

_COMBINE = {"sum": np.add, "mean": np.add, "only_first_replica": np.add, "max": np.maximum, "min": np.minimum}


def install() -> None:
    """Installs the seam for metric results."""
    replace(base_trainer.Trainer, "get_metrics_result", _over_all_replicas)


def _over_all_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_metrics_result(self: Any) -> Any:
        extended = current_strategy.of_model(self, DataParallel)
        if extended is None or _is_of_a_replica_or_symbolic():
            return original(self)
        variables = [variable for metric in self.metrics for variable in metric.variables]
        if not variables:
            return original(self)
        with backend.StatelessScope(state_mapping=merged(variables, extended)):
            # A result may be a variable, which must be read inside the scope.
            return tree.map_structure(_read, original(self))

    return get_metrics_result


def _read(result: Any) -> Any:
    """Returns a result as a tensor; Python numbers (Keras 3.10) are kept, as TensorFlow would make them float32."""
    return result if isinstance(result, (int, float)) else tf.convert_to_tensor(result)


def _is_of_a_replica_or_symbolic() -> bool:
    is_of_a_replica = (
        current_strategy.current(DataParallel) is not None and tf.distribute.get_replica_context() is not None
    )
    return is_of_a_replica or backend.in_stateless_scope()


def all_metrics(model: Any) -> list[Any]:
    """Returns the metrics of a model, including metrics inside others and those not in ``model.metrics``."""
    by_id: dict[int, Any] = {}
    pending = [*model.metrics, *(metric for layer in models.layers_of(model) for metric in models.metrics_in(layer))]
    while pending:
        metric = pending.pop(0)
        if id(metric) not in by_id:
            by_id[id(metric)] = metric
            pending += [*models.metrics_in(metric), *getattr(metric, "metrics", [])]
    return list(by_id.values())


def merged(variables: Sequence[Any], extended: DataParallel) -> list[tuple[Any, tf.Tensor]]:
    """Returns the state of metrics over all replicas; in the cross-replica context, in graphs and eagerly.

    Args:
        variables: Keras variables of metrics.
        extended: the strategy's `extended`.

    Returns:
        Pairs of a variable and its merged value.

    Raises:
        ValueError: there are several replicas, and a variable has the aggregation "none".
    """
    return merged_beside(variables, [], extended)[0]


def merged_beside(
    variables: Sequence[Any], numbers: Sequence[tf.Tensor], extended: DataParallel, locally: bool = False
) -> tuple[list[tuple[Any, tf.Tensor]], list[tf.Tensor]]:
    """Returns the state of metrics, and sums of numbers, in as few collectives as the state alone needs.

    Args:
        variables: Keras variables of metrics.
        numbers: this process's terms of the sums over processes.
        extended: the strategy's `extended`.
        locally: whether only the replicas of this process count.

    Returns:
        Pairs of a variable and its merged value; the sums.
    """
    locally = locally or extended.is_local_only
    unique = list({id(variable): variable for variable in variables}.values())
    values: dict[int, tf.Tensor] = {}
    for combine in (np.add, np.maximum, np.minimum):
        chosen = [variable for variable in unique if _COMBINE[_rule(variable, extended)] is combine]
        parts = [_of_this_process(variable, extended) for variable in chosen]
        names = [variable.path for variable in chosen]
        if combine is np.add:
            parts, names = [*parts, *numbers], [*names, *["a log of a step"] * len(numbers)]
        if not locally:
            parts = extended.bridge.all_reduce(parts, combine=combine, names=names, in_memory=True)
        if combine is np.add:
            parts, sums = parts[: len(chosen)], parts[len(chosen) :]
        for variable, total in zip(chosen, parts, strict=True):
            values[id(variable)] = _as_kept(variable, total, extended, locally)
    return [(variable, values[id(variable)]) for variable in unique], sums


def _rule(variable: Any, extended: DataParallel) -> str:
    rule = getattr(variable, MERGED_BY, variable.aggregation)
    if rule == "none" and not extended.has_several_replicas:
        return "sum"
    if rule == "none":
        raise ValueError(
            f"the metric variable {variable.path} cannot be merged over replicas: its aggregation is 'none'. Create it "
            "with add_variable(aggregation='sum', 'mean' or 'only_first_replica')."
        )
    return rule


def _of_this_process(variable: Any, extended: DataParallel) -> tf.Tensor:
    rule = _rule(variable, extended)
    copies = [copy.read_value() for copy in private.copies(models.value_of(variable))]
    if copies[0].dtype.is_bool:
        copies = [tf.cast(copy, tf.int32) for copy in copies]
    if rule == "only_first_replica":
        return copies[0] if extended.group.is_writer else tf.zeros_like(copies[0])
    if rule == "max":
        return tf.reduce_max(tf.stack(copies), axis=0) if len(copies) > 1 else copies[0]
    if rule == "min":
        return tf.reduce_min(tf.stack(copies), axis=0) if len(copies) > 1 else copies[0]
    return tf.add_n(copies) if len(copies) > 1 else copies[0]


def _as_kept(variable: Any, total: tf.Tensor, extended: DataParallel, locally: bool) -> tf.Tensor:
    if _rule(variable, extended) == "mean":
        replicas = len(extended.worker_devices) if locally else extended._num_replicas_in_sync
        total = total / tf.cast(replicas, total.dtype)
    return tf.cast(total, variable.dtype)


# How a step updates a variable.


def infer_merge_rule(variable: Any, values: Sequence[Any]) -> None:
    """Finds in the graph how a metric's variable is updated, and warns if summing its copies may be wrong.

    Args:
        variable: a Keras variable of a metric.
        values: the values assigned to it in a step.
    """
    if variable.aggregation not in ("sum", "none") or hasattr(variable, MERGED_BY):
        return
    for value in values:
        kind = _update(variable, value)
        if kind in ("max", "min"):
            merge_by_extreme(variable, kind)
        elif kind == "other" and variable.aggregation == "sum":
            setattr(variable, MERGED_BY, "sum")
            log.warning(
                "tfdist: the metric variable %s is overwritten in a step, not added to; the values of all replicas "
                "are summed, which may be wrong. Update it as a sum, a maximum or a minimum, or create it with "
                "add_variable(aggregation='mean' or 'only_first_replica').",
                variable.path,
            )


_TRANSPARENT = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "EnsureShape")
_UPDATES = {
    "Add": "sum", "AddV2": "sum", "AddN": "sum", "Sub": "sum", "AssignAddVariableOp": "sum",
    "Maximum": "max", "Minimum": "min",
}  # fmt: skip


def _update(variable: Any, value: Any) -> str:
    if not isinstance(value, tf.Tensor) or not tf.is_symbolic_tensor(value):
        return "unknown"
    operation = _seen_through(value).op
    kind = _UPDATES.get(operation.type)
    if kind is None:
        return "other" if operation.type not in ("Placeholder", "Const", "Fill", "ZerosLike") else "unknown"
    combined, operands, subtracted = _combined(operation, kind)
    handles = [part.op.inputs[0] for part in operands if part.op.type == "ReadVariableOp"]
    return kind if any(_is_additive_update(handle, combined, operands, subtracted) for handle in handles) else "other"


def _combined(operation: Any, kind: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the operations of a nested update such as ``total + a - b``, their operands, and subtracted tensors."""
    operations, operands, subtracted, pending = [], [], [], [operation]
    while pending:
        operation = pending.pop()
        operations.append(operation)
        parts = list(map(_seen_through, operation.inputs))
        if operation.type == "Sub":
            subtracted.append(parts.pop())
        for part in parts:
            if _UPDATES.get(part.op.type) == kind:
                pending.append(part.op)
            else:
                operands.append(part)
    return operations, operands, subtracted


def _is_additive_update(handle: Any, combined: list[Any], operands: list[Any], subtracted: list[Any]) -> bool:
    """Returns whether exactly one operand is the variable's value, and no other operand depends on that value.

    Otherwise, as in ``mean + (x - mean) * k / n``, the changes of several replicas do not add up.
    """
    reads = [part for part in operands if part.op.type == "ReadVariableOp" and part.op.inputs[0] is handle]
    others = {id(part.op) for part in operands} - {id(part.op) for part in reads} | {id(part.op) for part in subtracted}
    seen = {id(operation) for operation in combined}
    pending = [operation for operation in handle.consumers() if id(operation) not in seen]
    while pending:
        operation = pending.pop()
        if id(operation) in others:
            return False
        if id(operation) not in seen:
            seen.add(id(operation))
            pending += [following for output in operation.outputs for following in output.consumers()]
    return len(reads) == 1


def _seen_through(tensor: Any) -> Any:
    while tensor.op.type in _TRANSPARENT:
        tensor = tensor.op.inputs[0]
    return tensor


# Values that a step returns.


class Results:
    """A map from tensors of a step to the metrics that they are results of."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Any, Any, Any]] = {}
        self._entered = 0

    @contextlib.contextmanager
    def of(self, metrics: Sequence[Any]) -> Iterator[None]:
        """Context that records results of metrics.

        Args:
            metrics: the metrics to record.
        """
        # The replicas of several devices enter in turn before the first leaves.
        self._entered += 1
        if self._entered == 1:
            self._noted.clear()
            for metric in metrics:
                metric.result = self._noting(metric, type(metric).result)
        try:
            yield
        finally:
            self._entered -= 1
            if not self._entered:
                for metric in metrics:
                    metric.__dict__.pop("result", None)

    def _noting(self, metric: Any, result: Any) -> Callable[[], Any]:
        def noting() -> Any:
            results = result(metric)
            for path, tensor in tree.flatten_with_path(results):
                self._noted[id(tensor)] = (metric, path, tensor)
            return results

        return noting

    def whose(self, tensor: Any) -> tuple[Any, Any] | None:
        """Returns the metric that returned a tensor, and the tensor's path in that result; None if no metric did."""
        noted = self._noted.get(id(tensor))
        return None if noted is None else noted[:2]
