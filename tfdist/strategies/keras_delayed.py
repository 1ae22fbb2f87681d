"""Keras under a strategy whose sums of gradients are used a step later, while the next ones are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.keras import base_optimizer, base_trainer, tf_trainer
from tfdist.seams.registry import replace
from tfdist.strategies import at_work, keras_optimizers
from tfdist.strategies.abilities import DelaysUpdates
from tfdist.strategies.delayed_sums import DelayedSums


def install() -> None:
    """Installs the seams."""
    optimizers = [base_optimizer.BaseOptimizer, keras.optimizers.LossScaleOptimizer]
    if hasattr(keras.optimizers, "MultiOptimizer"):
        optimizers.append(keras.optimizers.MultiOptimizer)
    for optimizer in optimizers:  # each has an `apply` of its own, which the others call
        replace(optimizer, "apply", _one_step_late)
    replace(base_trainer.Trainer, "_get_metrics_result_or_logs", _after_the_last_update)
    for name in ("evaluate", "predict"):
        replace(tf_trainer.TensorFlowTrainer, name, _of_newest_weights)


def _one_step_late(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        extended = at_work.current(DelaysUpdates)
        if extended is None or tf.distribute.get_replica_context() is None or keras_optimizers.are_summed():
            return original(self, grads, trainable_variables)
        _check(self)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:  # as Keras does it
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
            self.built = True
        pairs = [pair for pair in zip(grads, variables, strict=True) if pair[0] is not None]
        if not pairs:
            return original(self, grads, trainable_variables)  # says so
        weighing = at_work.weighing()
        weight = tf.constant(1.0, tf.float64) if weighing is None else weighing.shares.weight()
        sums = extended.delayed_sums(self, [variable for _, variable in pairs])
        ready, totals = sums.exchanged([tf.convert_to_tensor(gradient) for gradient, _ in pairs], weight)
        return tf.cond(ready, lambda: _updated(original, self, totals, sums), lambda: tf.constant(False))

    return apply


def _updated(original: Callable[..., Any], optimizer: Any, totals: list[Any], sums: DelayedSums) -> tf.Tensor:
    with keras_optimizers.summed_before():
        original(optimizer, totals, sums.variables)
    return tf.constant(True)


def _check(optimizer: Any) -> None:
    what = "loss scaling" if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else ""
    for one in (optimizer, *getattr(optimizer, "optimizers", ())):
        what = "gradient_accumulation_steps" if getattr(one, "gradient_accumulation_steps", None) else what
    if what:
        raise ValueError(
            f"AllReduceStrategy(delay=1) sums a step's gradients during the next one, which does not go together with "
            f"{what} of the optimizer {optimizer.name}: leave one of the two out"
        )


class LastUpdates(keras.callbacks.Callback):
    """Begins `fit`, which may follow a loop or an interrupted `fit`, without an update under way.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: DelaysUpdates) -> None:
        super().__init__()
        self._extended = extended

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        settle(self.model, self._extended)


def settle(model: Any, extended: DelaysUpdates) -> None:
    """Makes the last updates of a model, whose gradients are under way; all processes call it.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    for optimizer, sums in extended.delayed_of(model):
        totals = sums.last()
        if totals is None:
            continue
        given = [tf.constant(total) for total in totals]

        def update(*given: tf.Tensor, optimizer: Any = optimizer, sums: DelayedSums = sums) -> None:
            with keras_optimizers.summed_before():
                optimizer.apply(list(given), sums.variables)

        strategy = extended._container_strategy()
        tf.function(lambda *given, update=update, strategy=strategy: strategy.run(update, given))(*given)


def _after_the_last_update(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras asks for an epoch's logs when its steps have been taken, before validation and callbacks."""

    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        _settle_if_delayed(self)
        return original(self, logs)

    return _get_metrics_result_or_logs


def _of_newest_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _settle_if_delayed(self)
        return original(self, *args, **kwargs)

    return method


def _settle_if_delayed(model: Any) -> None:
    extended = at_work.of_model(model, DelaysUpdates)
    if extended is not None:
        settle(model, extended)
