"""Hooks for strategies that have an ability: for their models, and for optimizers in their replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

import keras
import tensorflow as tf

from tfdist.seams import optimizer, trainer
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import Ability

A = TypeVar("A", bound=Ability)


class _OfAbility(Generic[A]):
    """Hooks of strategies with an ability.

    Args:
        extended: the strategy's `extended`.

    Attributes:
        ability: the class of the ability that a strategy needs for these hooks.
    """

    ability: ClassVar[type[Ability]] = Ability

    def __init__(self, extended: A) -> None:
        self.extended = extended


class ModelHooks(_OfAbility[A], trainer.TrainerHooks):
    """The hooks of a model that was made under a strategy with an ability."""


class StrategyOptimizerHooks(_OfAbility[A], optimizer.OptimizerHooks):
    """The hooks of any optimizer that a replica uses, whose strategy has an ability."""


class StrategyCallback(keras.callbacks.Callback, Generic[A]):
    """A callback that a strategy adds to those of its users.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: A) -> None:
        super().__init__()
        self._extended = extended


def add(*kinds: type[ModelHooks[Any]]) -> None:
    """Adds hooks for models, and installs the seams that they need.

    Args:
        kinds: classes of hooks, each for the models of strategies that have its ability.
    """
    trainer.points.provide(kinds, lambda model: _made(current_strategy.of_model(model, Ability), kinds))


def add_for_optimizers(*kinds: type[StrategyOptimizerHooks[Any]]) -> None:
    """Adds hooks for optimizers, and installs the seams that they need.

    Args:
        kinds: classes of hooks, each for optimizers in the replicas of strategies that have its ability.
    """
    optimizer.points.provide(kinds, lambda _: _made(_of_replica(), kinds))


def _of_replica() -> Ability | None:
    return None if tf.distribute.get_replica_context() is None else current_strategy.current(Ability)


def _made(extended: Ability | None, kinds: tuple[type[Any], ...]) -> Iterator[Any]:
    for kind in kinds:
        if isinstance(extended, kind.ability):
            yield kind(extended)
