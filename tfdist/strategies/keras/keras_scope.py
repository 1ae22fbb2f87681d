"""Checks that models and optimizers were made in the scope of the strategy that trains them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private import optimizers
from tfdist.private.models import strategy_of
from tfdist.seams import trainer
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.abilities import Ability
from tfdist.strategies.server_abilities import UpdatesOnServers


def install() -> None:
    """Installs the hooks."""
    trainer.points.provide([ScopeChecks], lambda model: [ScopeChecks()] if _is_in_a_scope() else [])
    keras_hooks.add(ServerScopeChecks)


def check(optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """Checks that an optimizer and variables were made in a strategy's scope.

    Args:
        optimizer: a Keras optimizer; None is not checked.
        variables: Keras variables.
        strategy: strategy whose servers update the variables.

    Raises:
        ValueError: the optimizer or a variable was made outside the scope.
    """
    outside = [f"the variable {variable.path}" for variable in variables if not _is_made_in(strategy, variable.value)]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is not None and optimizers.strategy_of(inner, strategy) is not strategy:
        outside.append(f"the optimizer {optimizer.name}")
    if outside:
        more = ", …" if len(outside) > 3 else ""
        raise ValueError(
            f"created outside of strategy.scope(): {', '.join(outside[:3])}{more}. Create the model, its layers, and "
            "the optimizer passed to `compile`, inside `with strategy.scope():`."
        )


def _is_made_in(strategy: tf.distribute.Strategy, variable: Any) -> bool:
    return strategy_of(variable, strategy) is strategy


def _is_in_a_scope() -> bool:
    return current_strategy.current(Ability) is not None and tf.distribute.in_cross_replica_context()


class ScopeChecks(trainer.TrainerHooks):
    """Hooks of models that are used in the scope of a strategy, but may have been made outside of it."""

    def compile(self, call: trainer.TrainerCall) -> None:
        """Checks the model: TensorFlow's own error comes later, in `fit`, and speaks of mixed strategies.

        Raises:
            ValueError: the model was made under no strategy of tfdist.
        """
        _check_model(call.model, Ability)

    def fit(self, call: trainer.TrainerCall) -> None:
        """Checks the model, if the strategy has parameter servers.

        Raises:
            ValueError: the model was not made under a strategy with parameter servers.
        """
        if current_strategy.current(UpdatesOnServers) is not None:
            _check_model(call.model, UpdatesOnServers)

    train_on_batch = fit


class ServerScopeChecks(keras_hooks.ModelHooks[UpdatesOnServers]):
    """Hooks that check that the variables and the optimizer were made in the scope, if servers update them."""

    ability = UpdatesOnServers

    @contextlib.contextmanager
    def compile(self, call: trainer.TrainerCall) -> Iterator[None]:
        """Checks the optimizer and the variables, after the model is compiled."""
        yield
        model = call.model
        check(getattr(model, "optimizer", None), model.trainable_variables, model.distribute_strategy)

    def fit(self, call: trainer.TrainerCall) -> None:
        """Checks the optimizer of the model."""
        check(getattr(call.model, "optimizer", None), [], call.model.distribute_strategy)

    train_on_batch = fit


def _check_model(model: Any, ability: type[Ability]) -> None:
    if current_strategy.of_model(model, ability) is None:
        raise ValueError(
            f"created outside of strategy.scope(): the model {model.name}, which is compiled or trained inside of it. "
            "Create the model and its layers inside `with strategy.scope():`, too."
        )
