"""Which strategy of tfdist is at work, if one is, and can do what a seam needs: what every seam asks first."""

from __future__ import annotations

from typing import Any, TypeVar

import tensorflow as tf

from tfdist.strategies.abilities import Ability, ReducesGradients, SharesBatches

A = TypeVar("A", bound=Ability)


def of_model(model: Any, ability: type[A]) -> A | None:
    """The inner half of the strategy that a model was built under, if it has the ability."""
    return of_strategy(getattr(model, "_distribute_strategy", None), ability)


def of_strategy(strategy: Any, ability: type[A]) -> A | None:
    """The inner half of a strategy, if it has the ability."""
    extended = getattr(strategy, "extended", None)
    return extended if isinstance(extended, ability) else None


def current(ability: type[A]) -> A | None:
    """The inner half of the strategy whose scope or replica this is in, if it has the ability."""
    return of_strategy(tf.distribute.get_strategy(), ability)


def sharing() -> SharesBatches | None:
    """The strategy at work, if the caller is one of its replicas, in a step of Keras's on shares."""
    extended = current(SharesBatches)
    return extended if extended is not None and extended.shares.active else None


def weighing() -> SharesBatches | None:
    """As `sharing`, if the gradients of the step are weighed by samples where they are reduced."""
    extended = sharing()
    return extended if isinstance(extended, ReducesGradients) else None
