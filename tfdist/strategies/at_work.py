"""Which `AllReduceStrategy` is at work, if one is: what every seam asks first."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.strategies.extended import AllReduceExtended


def of_model(model: Any) -> AllReduceExtended | None:
    """The inner half of the `AllReduceStrategy` that a model was built under, if it was."""
    return of_strategy(getattr(model, "_distribute_strategy", None))


def of_strategy(strategy: Any) -> AllReduceExtended | None:
    """The inner half of a strategy, if it is an `AllReduceStrategy`."""
    extended = getattr(strategy, "extended", None)
    return extended if isinstance(extended, AllReduceExtended) else None


def current() -> AllReduceExtended | None:
    """The inner half of the `AllReduceStrategy` whose scope or replica this is in, if it is."""
    return of_strategy(tf.distribute.get_strategy())
