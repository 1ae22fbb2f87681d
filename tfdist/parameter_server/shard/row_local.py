"""Which optimizers leave the rows alone that a sparse gradient does not name."""

from __future__ import annotations

from typing import Any

_VALUES = frozenset("SGD Adagrad Adadelta RMSprop".split())
_SLOTS = frozenset("SGD Adagrad".split())
"""Adadelta and RMSprop decay the slots of all rows, but move named rows only. Ftrl computes all rows from its slots."""


def keeps_other_values(optimizer: Any, decays: bool = True) -> bool:
    """Whether an update by a sparse gradient leaves the values of other rows as they are, to the last bit.

    Momentum moves all rows, and so do weight decay, accumulated gradients, and averages that overwrite the values.

    Args:
        optimizer: a Keras optimizer.
        decays: whether its weight decay applies to the variable.
    """
    return (
        type(optimizer).__module__.startswith("keras.")
        and type(optimizer).__name__ in _VALUES
        and not getattr(optimizer, "momentum", 0)
        and (optimizer.weight_decay is None or not decays)
        and not optimizer.gradient_accumulation_steps
        and not (optimizer.use_ema and optimizer.ema_overwrite_frequency)
    )


def keeps_other_rows(optimizer: Any, decays: bool = True) -> bool:
    """As `keeps_other_values`, the values and also the slots.

    Args:
        optimizer: a Keras optimizer.
        decays: whether its weight decay applies to the variable.
    """
    return keeps_other_values(optimizer, decays) and type(optimizer).__name__ in _SLOTS and not optimizer.use_ema
