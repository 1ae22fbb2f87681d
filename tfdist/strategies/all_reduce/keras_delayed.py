"""Hooks of Keras for a strategy whose sums of gradients are used a step later."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.engine import precision
from tfdist.private.optimizers import variables_of
from tfdist.seams.once import Once
from tfdist.seams.optimizer import OptimizerCall
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.abilities import DelaysUpdates
from tfdist.strategies.keras import keras_optimizers


@Once
def install() -> None:
    """Installs the hooks."""
    keras_hooks.add_for_optimizers(DelayedOptimizerHooks)
    keras_hooks.add(DelayedModelHooks)


class DelayedOptimizerHooks(keras_hooks.StrategyOptimizerHooks[DelaysUpdates]):
    """Hooks of an optimizer that make each update with the sums of the step before."""

    ability = DelaysUpdates

    def apply(self, call: OptimizerCall) -> None:
        """Begins the sums of this step's gradients, and applies the sums of the step before."""
        if call.is_outermost and not keras_optimizers.are_summed():
            call.replace(lambda: self._applied(call))

    def _applied(self, call: OptimizerCall) -> Any:
        optimizer, given = call.optimizer, call.arguments["trainable_variables"]
        _check(optimizer)
        variables = variables_of(optimizer) if given is None else list(given)
        if not optimizer.built:  # as Keras does it
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
            optimizer.built = True
        pairs = [pair for pair in zip(call.arguments["grads"], variables, strict=True) if pair[0] is not None]
        if not pairs:
            return call.inner()  # raises Keras's error about missing gradients
        sharing = current_strategy.sharing()
        weight = tf.constant(1.0, tf.float64) if sharing is None else sharing.shares.weight()
        sums = self.extended.delayed_sums(optimizer, [variable for _, variable in pairs])
        gradients = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
        terms = precision.widened(gradients) if self.extended.float32_sums else gradients
        ready, totals = sums.exchanged(terms, weight)
        totals = precision.narrowed(totals, gradients)
        call.arguments.update(grads=totals, trainable_variables=sums.variables)
        return tf.cond(ready, lambda: _updated(call), lambda: tf.constant(False))


def _updated(call: OptimizerCall) -> tf.Tensor:
    with keras_optimizers.summed_before():
        call.inner()
    return tf.constant(True)


def _check(optimizer: Any) -> None:
    what = "loss scaling" if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else ""
    for candidate in (optimizer, *getattr(optimizer, "optimizers", ())):
        what = "gradient_accumulation_steps" if getattr(candidate, "gradient_accumulation_steps", None) else what
    if what:
        raise ValueError(
            f"AllReduceStrategy(delay=1) sums a step's gradients during the next step, which does not work with "
            f"{what} of the optimizer {optimizer.name}: leave out one of the two"
        )


class LastUpdates(keras_hooks.StrategyCallback[DelaysUpdates]):
    """A callback that makes pending updates before `fit`: a custom loop or an interrupted `fit` may have left some."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes the last updates of earlier training."""
        settle(self.model, self._extended)


def settle(model: Any, extended: DelaysUpdates) -> None:
    """Makes the last updates of a model, whose gradients are still being summed; all processes call it.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    for optimizer, sums in extended.delayed_of(model):
        totals = sums.last()
        if totals is None:
            continue
        pairs = zip(totals, sums.variables, strict=True)
        gradients = [tf.cast(tf.constant(total), variable.dtype) for total, variable in pairs]
        # Eagerly: a graph would be traced each time, once an epoch.
        with keras_optimizers.summed_before():
            extended._container_strategy().run(optimizer.apply, (gradients, sums.variables))


class DelayedModelHooks(keras_hooks.ModelHooks[DelaysUpdates]):
    """Hooks of a model that make its last updates before weights are read."""

    ability = DelaysUpdates

    def evaluate(self, call: TrainerCall) -> None:
        """Makes the last updates of the model."""
        settle(call.model, self.extended)

    predict = epoch_logs = evaluate

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Adds the callback that makes pending updates before `fit`."""
        return [LastUpdates(self.extended), *given]
