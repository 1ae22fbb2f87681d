"""Finds the tfdist strategy in use, if there is one and it has the ability that a seam needs."""

from __future__ import annotations

from typing import Any, TypeVar

import tensorflow as tf

from tfdist.private.models import strategy_of
from tfdist.strategies.abilities import Ability, DataParallel

A = TypeVar("A", bound=Ability)


def of_model(model: Any, ability: type[A]) -> A | None:
    """Returns the `extended` of the strategy that a model was built under, if it has the ability, else None."""
    return of_strategy(strategy_of(model), ability)


def of_strategy(strategy: Any, ability: type[A]) -> A | None:
    """Returns the `extended` of a strategy, if it has the ability, else None."""
    extended = getattr(strategy, "extended", None)
    return extended if isinstance(extended, ability) else None


def current(ability: type[A]) -> A | None:
    """Returns the `extended` of the strategy whose scope or replica the caller is in, if it has the ability."""
    return of_strategy(tf.distribute.get_strategy(), ability)


def sharing() -> DataParallel | None:
    """Returns the `extended` of the strategy in use, if the caller is one of its replicas in a Keras step on shares."""
    extended = current(DataParallel)
    return extended if extended is not None and extended.shares.active else None
