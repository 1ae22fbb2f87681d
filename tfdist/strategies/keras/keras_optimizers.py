"""Keras optimizers: gradients are reduced before any other processing; all replicas agree on whether they are finite.

Keras clips gradients, decays and averages weights on every replica, and has `tf.distribute` sum the gradients last.
Here gradients are summed first, so that clipping applies to the gradient that one process would have. Accumulated
gradients are summed when they are applied, not in each step. Where processes take steps on their own, gradients are
summed within each process only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.engine import precision
from tfdist.notices import warn_once
from tfdist.private import tensorflow as private
from tfdist.private.keras import base_optimizer, tf_optimizer
from tfdist.private.optimizers import accumulated_by, key_of, strategy_of
from tfdist.seams.optimizer import OptimizerCall, OptimizerHooks, Update, points, update_of, within_update
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.data.shares import weighed
from tfdist.strategies.divided_abilities import DividesUpdates
from tfdist.strategies.keras.state_of_steps import state_of_step
from tfdist.thread_values import ThreadValue

_OUTSIDE = (
    "tfdist: the optimizer %s makes an update outside of `strategy.run`. Gradients are not summed over processes then, "
    "so each process trains by itself. Call the step by strategy.run(step, args=batch), or train with fit."
)


def install() -> None:
    """Installs the seams for optimizers."""
    keras_hooks.add_for_optimizers(Reduced)
    points.provide([OutsideOfReplicas], _outside_of_replicas)
    replace(tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients", _unless_summed)
    base_optimizer.ops = _OptimizerOps(base_optimizer.ops)


def innermost(optimizer: Any) -> Any:
    """Returns the innermost optimizer within wrappers such as `keras.optimizers.LossScaleOptimizer`.

    Args:
        optimizer: Keras optimizer; any other object is returned unchanged.
    """
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def accumulators(optimizer: Any) -> list[Any]:
    """Returns the variables in which an optimizer and its inner ones accumulate gradients; they differ by process.

    Args:
        optimizer: Keras optimizer; None has no such variables.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    accumulated = accumulated_by(optimizer)
    return accumulated + (accumulators(inner) if inner is not None else [])


_summed_before = ThreadValue(False)
"""Whether the gradients that a thread gives to an optimizer are sums over all replicas."""


def are_summed() -> bool:
    """Returns whether the caller is inside of `summed_before`."""
    return _summed_before.value


def summed_before() -> contextlib.AbstractContextManager[None]:
    """Context in which an optimizer is given gradients that are weighted and summed over all replicas already."""
    return _summed_before.set_to(True)


class Reduced(keras_hooks.StrategyOptimizerHooks[DataParallel]):
    """Hooks that weight gradients by samples and sum them over replicas, which agree on whether they are finite."""

    ability = DataParallel

    def apply(self, call: OptimizerCall) -> None:
        """Sums gradients of a scaled loss before the check whether they are finite, if that changes nothing else.

        The check then applies to the sum, as in one process, and has the same result on all replicas. Otherwise the sum
        in the branch after the check would need one collective, and the check another.
        """
        if not isinstance(call.optimizer, keras.optimizers.LossScaleOptimizer) or not call.is_outermost:
            return
        given = call.arguments["grads"], call.arguments["trainable_variables"]
        if self._is_summed_before_the_check(call.optimizer, *given):
            call.replace(lambda: self._apply_sums(call, *given))

    def _is_summed_before_the_check(self, optimizer: Any, gradients: Sequence[Any], variables: Any) -> bool:
        inner, extended = optimizer.inner_optimizer, self.extended
        return (
            current_strategy.sharing() is not None
            and not _summed_before.value
            and extended.synchronizes_steps
            and len(extended.worker_devices) == 1
            and variables is not None
            and type(inner).apply is base_optimizer.BaseOptimizer.apply
            and not inner.gradient_accumulation_steps
            and extended.compressor is None  # an overflow must not become a residual
            and extended.norms is None
            and not isinstance(extended, DividesUpdates)  # which sums what each process updates, later
            and all(_is_dense_number(gradient) for gradient in gradients)
            and not any(getattr(variable, "overwrite_with_gradient", False) for variable in variables)
        )

    def _apply_sums(self, call: OptimizerCall, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        update = Update(call.optimizer.inner_optimizer, [variables[place] for place in places])
        given = self.begin(update, [gradients[place] for place in places])
        sums = list(gradients)
        for place, total in zip(places, self.gradients(update, given), strict=True):
            sums[place] = total
        call.arguments["grads"] = sums
        with summed_before():
            call.inner()

    def begin(self, update: Update, gradients: list[Any]) -> list[Any]:
        """Weights gradients by samples, or has the reduction do so."""
        extended = self.extended
        update.is_summed = _summed_before.value
        if update.is_summed:
            return gradients
        sharing = current_strategy.sharing()
        if sharing is not None:
            weight = sharing.shares.weight()
            if not extended.synchronizes_steps and len(extended.worker_devices) == 1:
                gradients = _of_samples(gradients, sharing.shares.is_empty())  # nothing is summed: the weight is 0 or 1
            elif self._can_be_weighed_on_the_way(update, gradients):
                update.weight = weight
            else:
                gradients = [weighed(gradient, weight) for gradient in gradients]
        elif extended.averaging_processes > 1:  # a loop divides its losses by the samples of all replicas
            processes = tf.constant(extended.averaging_processes, tf.float64)
            gradients = [weighed(gradient, processes) for gradient in gradients]
        if extended.compressor is not None:
            extended.compressor.register(
                {
                    key: (
                        variable.path if isinstance(variable, keras.Variable) else variable.name,
                        tuple(variable.shape),
                    )
                    for key, variable in zip(_keys(update), update.variables, strict=True)
                }
            )
        return gradients

    def _can_be_weighed_on_the_way(self, update: Update, gradients: list[Any]) -> bool:
        """Returns whether gradients can be weighted while they are summed over processes, to save a pass over them."""
        return (
            len(self.extended.worker_devices) == 1
            and not update.optimizer.gradient_accumulation_steps
            and all(gradient.dtype.is_floating for gradient in gradients)
        )

    def gradients(self, update: Update, gradients: list[Any]) -> list[Any]:
        """Returns the sums of the gradients over all replicas."""
        if update.is_summed:
            return gradients
        terms, beside = list(gradients), []
        for gradient, variable in zip(terms, update.variables, strict=True):
            if tf.is_symbolic_tensor(gradient):
                gradient.set_shape(variable.shape)  # a tensor of unknown size would get a collective of its own
        if self.extended.float32_sums:
            terms = precision.widened(terms)
        sharing, norms, state = current_strategy.sharing(), self.extended.norms, state_of_step()
        if state is not None:
            beside += state.means(weighs=update.weight is None)
        if norms is not None and sharing is not None:
            beside.append(norms.own(terms, sharing.shares.weight(), update.weight is None))
        options = private.WeighedOptions((*_keys(update), *[None] * len(beside)), update.weight)
        replica = tf.distribute.get_replica_context()
        sums = list(replica.all_reduce(tf.distribute.ReduceOp.SUM, terms + beside, options))
        sums, of_beside = sums[: len(terms)], sums[len(terms) :]
        if norms is not None and sharing is not None:
            of_all = of_beside.pop()
            if not private.local_replica_id():
                norms.add(sums, of_all, sharing.shares.total())
        if state is not None:
            state.take(of_beside)
        update.is_summed = True
        return precision.narrowed(sums, gradients)

    def overwriting(self, variables: Sequence[Any], values: list[Any]) -> list[Any]:
        """Returns the maximum of each value over replicas.

        Keras also accumulates such values by the maximum. A stand-in row has no effect: it is a row of the batch, or
        zeros.
        """

        def largest(strategy: Any, *values: Any) -> list[tf.Tensor]:
            parts = [strategy.experimental_local_results(value) for value in values]
            names = [variable.path for variable in variables]
            return self.extended.step_bridge.all_reduce(
                [tf.reduce_max(tf.stack(part), axis=0) for part in parts], combine=np.maximum, names=names
            )

        maxima: list[Any] = tf.distribute.get_replica_context().merge_call(largest, args=tuple(values))
        return maxima

    def finite(self, is_finite: Any) -> Any:
        """Returns whether gradients are finite on all replicas that have samples."""
        if _summed_before.value:
            return is_finite
        infinite = tf.cast(tf.logical_not(is_finite), tf.int32)
        sharing = current_strategy.sharing()
        if sharing is not None:
            infinite = tf.where(sharing.shares.is_empty(), 0, infinite)
        replica = tf.distribute.get_replica_context()
        return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, infinite, private.OwnOptions()), 0)


class OutsideOfReplicas(OptimizerHooks):
    """Hooks for a loop that does not call its step by `strategy.run`, so that nothing is summed.

    Args:
        strategy: strategy in whose scope the optimizer was made.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy

    def apply(self, call: OptimizerCall) -> None:
        """Warns once that each process trains by itself; the variables of the optimizer are made in the scope."""
        if self._strategy.num_replicas_in_sync > 1:
            warn_once(_OUTSIDE, call.optimizer.name)
        variables = call.arguments["trainable_variables"]
        if not call.optimizer.built and variables is not None:
            with tf.init_scope(), self._strategy.scope():
                call.optimizer.build(variables)


def _outside_of_replicas(optimizer: Any) -> list[OutsideOfReplicas]:
    strategy = strategy_of(optimizer)
    if current_strategy.of_strategy(strategy, DataParallel) is None or are_summed():
        return []
    is_replica = tf.distribute.get_replica_context() is not None and tf.distribute.get_strategy() is strategy
    return [] if is_replica else [OutsideOfReplicas(strategy)]


def _of_samples(gradients: list[Any], is_empty: tf.Tensor) -> list[Any]:
    """Returns gradients; zeros if the replica has no samples. Otherwise there is no pass over them."""
    zero = tf.constant(0.0, tf.float64)
    given: list[Any] = tf.cond(is_empty, lambda: [weighed(one, zero) for one in gradients], lambda: list(gradients))
    return given


def _is_dense_number(gradient: Any) -> bool:
    return gradient is None or (isinstance(gradient, tf.Tensor) and gradient.dtype.is_floating)


def _keys(update: Update) -> tuple[str, ...]:
    return tuple(key_of(variable) for variable in update.variables)


def _unless_summed(original: Callable[..., Any]) -> Callable[..., Any]:
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        update = update_of(self)
        return grads_and_vars if update is not None and update.is_summed else original(self, grads_and_vars)

    return _all_reduce_sum_gradients


class _OptimizerOps:
    """A stand-in for `keras.ops` in the optimizers that takes conditionals for all local replicas at once.

    Gradient accumulation and weight averaging put updates inside `ops.cond`. Replicas on several devices can
    synchronize there only if one conditional contains the branches of all replicas.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def cond(self, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        extended = current_strategy.current(DataParallel)
        replica = tf.distribute.get_replica_context()
        if extended is None or replica is None or len(extended.worker_devices) == 1:
            return self._ops.cond(pred, true_fn, false_fn)

        branches = _Branches({"true": within_update(true_fn), "false": within_update(false_fn)})

        def take(strategy: Any, pred: Any, branches: Any) -> None:
            def run(branch: str) -> Callable[[], None]:
                def in_each_replica() -> None:
                    strategy.extended.call_for_each_replica(
                        lambda functions: functions.branches[branch](), args=(branches,)
                    )

                return in_each_replica

            self._ops.cond(strategy.experimental_local_results(pred)[0], run("true"), run("false"))

        return replica.merge_call(take, args=(pred, branches))


class _Branches:
    """The two branches of one replica; an object, so that `tf.distribute` does not unpack it."""

    def __init__(self, branches: dict[str, Callable[[], Any]]) -> None:
        self.branches = branches
