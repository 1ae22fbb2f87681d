"""Tells which optimizers leave rows unchanged that a sparse gradient does not name."""

from __future__ import annotations

from typing import Any

_VALUES = frozenset("SGD Adagrad Adadelta RMSprop".split())
_SLOTS = frozenset("SGD Adagrad".split())
"""Optimizers that also keep other rows' slots. Adadelta and RMSprop decay the slots of all rows.

Ftrl is in neither set, as it computes the values of all rows from its slots.
"""


def keeps_other_values(optimizer: Any, decays: bool = True) -> bool:
    """Returns whether an update by a sparse gradient leaves the values of other rows as they are, to the last bit.

    Momentum moves all rows, and so do weight decay, accumulated gradients, and averages that overwrite the values.

    Args:
        optimizer: a Keras optimizer.
        decays: whether the optimizer's weight decay applies to the variable.
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
    """Returns whether an update by a sparse gradient leaves values and slots of other rows as they are.

    Args:
        optimizer: a Keras optimizer.
        decays: whether the optimizer's weight decay applies to the variable.
    """
    return keeps_other_values(optimizer, decays) and type(optimizer).__name__ in _SLOTS and not optimizer.use_ema
