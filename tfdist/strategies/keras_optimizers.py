"""Keras optimizers: gradients are reduced before any other processing; all replicas agree on whether they are finite.

Keras clips gradients, decays and averages weights on every replica, and has `tf.distribute` sum the gradients last.
Here they are summed first, so that clipping applies to the gradient that one process would have. Accumulated gradients
are summed when they are applied. In a step in which the strategy does not reduce, every replica uses its own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.private.keras import base_optimizer, tf_optimizer
from tfdist.seams.registry import replace
from tfdist.strategies import at_work
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.abilities import ReducesGradients
from tfdist.strategies.shares import weighed


def install() -> None:
    """Installs the seams for optimizers."""
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _finite_everywhere)
    replace(base_optimizer.BaseOptimizer, "_overwrite_variables_directly_with_gradients", _largest_everywhere)
    replace(base_optimizer.BaseOptimizer, "_backend_apply_gradients", _weighed_by_samples)
    replace(base_optimizer.BaseOptimizer, "_clip_gradients", _summed_first)
    replace(tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients", _unless_summed)
    base_optimizer.ops = _OptimizerOps(base_optimizer.ops)


def innermost(optimizer: Any) -> Any:
    """The optimizer within others, such as `keras.optimizers.LossScaleOptimizer`.

    Args:
        optimizer: of Keras; anything else is returned.
    """
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def accumulators(optimizer: Any) -> list[Any]:
    """The variables in which an optimizer, and those within it, accumulate gradients: they are each process's own.

    Args:
        optimizer: of Keras; None has none.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    own = list(getattr(optimizer, "_accumulated_gradients", None) or [])
    return own + (accumulators(inner) if inner is not None else [])


class _Summed(threading.local):
    """Whether gradients that this thread gives to an optimizer are sums over all replicas."""

    def __init__(self) -> None:
        self.before = False


_summed = _Summed()


def are_summed() -> bool:
    """Whether the caller is inside of `summed_before`."""
    return _summed.before


@contextlib.contextmanager
def summed_before() -> Iterator[None]:
    """Context in which an optimizer is given gradients that have been weighed and summed over all replicas."""
    before, _summed.before = _summed.before, True
    try:
        yield
    finally:
        _summed.before = before


def _finite_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_finite(self: Any, grads: Any) -> Any:
        finite, replica = original(self, grads), tf.distribute.get_replica_context()
        if at_work.current(ReducesGradients) is None or replica is None:
            return finite
        infinite = tf.cast(tf.logical_not(finite), tf.int32)
        sharing = at_work.sharing()
        if sharing is not None:  # ignore replicas without samples
            infinite = tf.where(sharing.shares.is_empty(), 0, infinite)
        return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, infinite, private.OwnOptions()), 0)

    return check_finite


def _largest_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Overwrites variables whose "gradient" is their new value (float8 ranges) with the maximum over replicas.

    Keras also accumulates them by the maximum. A stand-in row has no effect: it is a row of the batch, or zeros.
    """

    def _overwrite_variables_directly_with_gradients(self: Any, grads: Any, variables: Any) -> Any:
        extended = at_work.current(ReducesGradients)
        replica = tf.distribute.get_replica_context()
        chosen = [place for place, variable in enumerate(variables) if self._overwrite_variable_with_gradient(variable)]
        if extended is None or replica is None or not chosen:
            return original(self, grads, variables)

        def largest(strategy: Any, *values: Any) -> list[tf.Tensor]:
            parts = [strategy.experimental_local_results(value) for value in values]
            names = [variables[place].path for place in chosen]
            return extended.in_steps.all_reduce(
                [tf.reduce_max(tf.stack(part), axis=0) for part in parts], combine=np.maximum, names=names
            )

        grads = list(grads)
        found = replica.merge_call(largest, args=tuple(grads[place] for place in chosen))
        for place, value in zip(chosen, found, strict=True):
            grads[place] = value
        return original(self, grads, variables)

    return _overwrite_variables_directly_with_gradients


class _Reduction:
    """The state of an optimizer's gradients, from being given to the optimizer until they are applied.

    Attributes:
        variables: ids of their variables.
        weight: the factor that the process's gradients must still be multiplied by; None if they have been.
        summed: the local replicas whose gradients are already summed.
    """

    def __init__(self) -> None:
        self.variables: tuple[str, ...] = ()
        self.weight: tf.Tensor | None = None
        self.summed: set[int | None] = set()


_reductions: weakref.WeakKeyDictionary[Any, _Reduction] = weakref.WeakKeyDictionary()


def _weighed_by_samples(original: Callable[..., Any]) -> Callable[..., Any]:
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        extended = at_work.current(ReducesGradients)
        if extended is None or tf.distribute.get_replica_context() is None or _summed.before:
            return original(self, grads, trainable_variables)
        reduction = _reductions.setdefault(self, _Reduction())
        reduction.weight = None
        weighing = at_work.weighing()
        if weighing is not None:
            weight = weighing.shares.weight()
            if _can_be_weighed_on_the_way(self, grads, extended):
                reduction.weight = weight
            else:
                grads = [weighed(grad, weight) for grad in grads]
        reduction.variables = tuple(self._var_key(variable) for variable in trainable_variables)
        if extended.compressor is not None:
            extended.compressor.register(
                {
                    key: (
                        variable.path if isinstance(variable, keras.Variable) else variable.name,
                        tuple(variable.shape),
                    )
                    for key, variable in zip(reduction.variables, trainable_variables, strict=True)
                }
            )
        return original(self, grads, trainable_variables)

    return _backend_apply_gradients


def _can_be_weighed_on_the_way(optimizer: Any, grads: Any, extended: ReducesGradients) -> bool:
    """Whether gradients can be weighted while they are summed over processes, which saves a pass over them."""
    return (
        len(extended.worker_devices) == 1
        and not optimizer.gradient_accumulation_steps
        and all(grad.dtype.is_floating for grad in grads)
    )


def _summed_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def _clip_gradients(self: Any, grads: Any) -> Any:
        extended = at_work.current(ReducesGradients)
        reduction = _reductions.get(self)
        if extended is None or tf.distribute.get_replica_context() is None or reduction is None or _summed.before:
            return original(self, grads)
        own, variables = list(grads), reduction.variables
        weighing, norms = at_work.weighing(), extended.norms
        if norms is not None and weighing is not None:
            own.append(norms.own(own, weighing.shares.weight(), reduction.weight is None))
            variables = (*variables, "norms of gradients")
        options = private.WeighedOptions(variables, reduction.weight)
        grads = list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own, options))
        if norms is not None and weighing is not None:
            of_all = grads.pop()
            if not private.local_replica_id():
                norms.add(grads, of_all, weighing.shares.total())
        reduction.summed.add(private.local_replica_id())
        return original(self, grads)

    return _clip_gradients


def _unless_summed(original: Callable[..., Any]) -> Callable[..., Any]:
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        if _summed.before:
            return grads_and_vars
        reduction = _reductions.get(self)
        replica_id = private.local_replica_id()
        if reduction is None or replica_id not in reduction.summed:
            return original(self, grads_and_vars)
        reduction.summed.discard(replica_id)
        return grads_and_vars

    return _all_reduce_sum_gradients


class _OptimizerOps:
    """Stands in for `keras.ops` in the optimizers: conditionals are taken for all local replicas at once.

    Gradient accumulation and weight averaging put updates inside `ops.cond`. Replicas on several devices can
    synchronize there only if the conditional is outside of them.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def cond(self, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        extended = at_work.current(ReducesGradients)
        replica = tf.distribute.get_replica_context()
        if extended is None or replica is None or len(extended.worker_devices) == 1:
            return self._ops.cond(pred, true_fn, false_fn)

        def take(strategy: Any, pred: Any, branches: Any) -> None:
            def run(branch: str) -> Callable[[], None]:
                def in_each_replica() -> None:
                    strategy.extended.call_for_each_replica(
                        lambda functions: functions.branches[branch](), args=(branches,)
                    )

                return in_each_replica

            self._ops.cond(strategy.experimental_local_results(pred)[0], run("true"), run("false"))

        return replica.merge_call(take, args=(pred, _Branches({"true": true_fn, "false": false_fn})))


class _Branches:
    """The two branches of one replica; an object, so that `tf.distribute` does not unpack it."""

    def __init__(self, branches: dict[str, Callable[[], Any]]) -> None:
        self.branches = branches
