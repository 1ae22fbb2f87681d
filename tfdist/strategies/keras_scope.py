"""Where models and optimizers are made: strategies train only what was made in their scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private.keras import base_trainer, tf_trainer
from tfdist.seams.registry import replace
from tfdist.strategies import at_work
from tfdist.strategies.abilities import Ability, UpdatesOnServers


def install() -> None:
    """Installs the seams."""
    replace(base_trainer.Trainer, "compile", _checked)
    for name in ("fit", "train_on_batch"):
        replace(tf_trainer.TensorFlowTrainer, name, _made_inside)


def check(optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """Checks that an optimizer and variables were made in a strategy's scope.

    Args:
        optimizer: a Keras optimizer; None for none.
        variables: of Keras.
        strategy: whose servers update them.

    Raises:
        ValueError: some were made elsewhere.
    """
    outside = [f"the variable {one.path}" for one in variables if not _is_made_in(strategy, one.value)]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is not None and getattr(inner, "_distribution_strategy", strategy) is not strategy:
        outside.append(f"the optimizer {optimizer.name}")
    if outside:
        more = ", …" if len(outside) > 3 else ""
        raise ValueError(
            f"created outside of strategy.scope(): {', '.join(outside[:3])}{more}. Create the model, its layers, and "
            "the optimizer passed to `compile`, inside `with strategy.scope():`."
        )


def _is_made_in(strategy: tf.distribute.Strategy, variable: Any) -> bool:
    return getattr(variable, "_distribute_strategy", strategy) is strategy


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Raises at `compile`; TensorFlow would speak of mixed strategies in `fit`, where the optimizer is built."""

    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_model(self, Ability)
        original(self, *args, **kwargs)
        if at_work.of_model(self, UpdatesOnServers) is not None:
            check(getattr(self, "optimizer", None), self.trainable_variables, self.distribute_strategy)

    return compile


def _made_inside(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_model(self, UpdatesOnServers)
        if at_work.of_model(self, UpdatesOnServers) is not None:
            check(getattr(self, "optimizer", None), [], self.distribute_strategy)
        return original(self, *args, **kwargs)

    return method


def _check_model(model: Any, ability: type[Ability]) -> None:
    """Checks that a model that is used in the scope of a strategy with an ability was made there.

    Raises:
        ValueError: it was not.
    """
    if at_work.current(ability) is None or not tf.distribute.in_cross_replica_context():
        return
    if at_work.of_model(model, ability) is None:
        raise ValueError(
            f"created outside of strategy.scope(): the model {model.name}, which is compiled or trained inside of it. "
            "Create the model and its layers inside `with strategy.scope():`, too."
        )
