"""Keras's optimizers: all agree on what is finite, say whose gradients they reduce, and meet in conditionals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer

from tfdist.strategies import at_work
from tfdist.strategies import tensorflow_private as private


def install(replace: Callable[..., None]) -> None:
    """Puts the seams of the optimizers in place.

    Args:
        replace: puts one function in the place of another.
    """
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _finite_everywhere)
    replace(tf_optimizer.TFOptimizer, "_backend_update_step", _with_variables_known)
    replace(tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients", _telling_whose)
    base_optimizer.ops = _OptimizerOps(base_optimizer.ops)


def _finite_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        extended = at_work.current()
        replica = tf.distribute.get_replica_context()
        if extended is None or replica is None:
            return finite
        if extended.sample_counts.active:
            finite = tf.logical_or(finite, extended.sample_counts.own_is_empty())
        infinite = tf.cast(tf.logical_not(finite), tf.int32)
        return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, infinite), 0)

    return check_finite


def _with_variables_known(original: Callable[..., Any]) -> Callable[..., Any]:
    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.current()
        if extended is not None and extended.compressor is not None:
            known = {}
            for variable in trainable_variables:
                path = variable.path if isinstance(variable, keras.Variable) else variable.name
                known[self._var_key(variable)] = path, tuple(variable.shape)
            extended.compressor.know(known)
        return original(self, grads, trainable_variables, *args, **kwargs)

    return _backend_update_step


def _telling_whose(original: Callable[..., Any]) -> Callable[..., Any]:
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        extended = at_work.current()
        replica = tf.distribute.get_replica_context()
        if extended is None or extended.compressor is None or replica is None:
            return original(self, grads_and_vars)
        pairs = list(grads_and_vars)
        present = [(grad, variable) for grad, variable in pairs if grad is not None]
        options = private.GradientOptions([self._var_key(variable) for _, variable in present])
        grads = [grad for grad, _ in present]
        reduced = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, grads, options) if grads else [])
        return [(None if grad is None else next(reduced), variable) for grad, variable in pairs]

    return _all_reduce_sum_gradients


class _OptimizerOps:
    """`keras.ops` as the optimizers see it: conditionals are taken for all local replicas at once.

    Gradient accumulation and the averaging of weights hold updates inside `ops.cond`; replicas of several devices
    can meet there only if the conditional stands outside of them.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def cond(self, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        extended = at_work.current()
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
    """One replica's two ways; an object, so that `tf.distribute` passes it through as it is."""

    def __init__(self, branches: dict[str, Callable[[], Any]]) -> None:
        self.branches = branches
