"""Private members of Keras's optimizers, read here and in `tfdist.seams` only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def apply_count(optimizer: Any) -> Any:
    """The variable that counts calls of ``apply``; with accumulation they are more than ``iterations``."""
    return optimizer._iterations


def learning_rate(optimizer: Any) -> Any:
    """What it was given as such: a variable, a schedule or a callable; None for what has no rate of its own."""
    return getattr(optimizer, "_learning_rate", None)


def variables_of(optimizer: Any) -> list[Any]:
    """The variables that it updates; none of one that is not built."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def averages_of(optimizer: Any) -> list[Any]:
    """The moving averages that it keeps of its variables; none without ``use_ema``."""
    return list(getattr(optimizer, "_model_variables_moving_average", None) or ())


def accumulated_by(optimizer: Any) -> list[Any]:
    """The sums of gradients that it accumulates, in the order of its variables."""
    return list(getattr(optimizer, "_accumulated_gradients", None) or ())


def place_of(optimizer: Any, variable: Any) -> int:
    """The place of a variable among those that it updates."""
    place: int = optimizer._get_variable_index(variable)
    return place


def key_of(optimizer: Any, variable: Any) -> str:
    """What it knows a variable by."""
    key: str = optimizer._var_key(variable)
    return key


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether a variable's weight decays."""
    return bool(optimizer._use_weight_decay(variable))


def strategy_of(optimizer: Any, otherwise: Any = None) -> Any:
    """The strategy that it was made under."""
    return getattr(optimizer, "_distribution_strategy", otherwise)


def clipped(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Gradients as it clips them."""
    return list(optimizer._clip_gradients(gradients))
