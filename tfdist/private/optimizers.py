"""Private members of Keras's optimizers, read here and in `tfdist.seams` only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.private.keras import tf_optimizer

_ELEMENTWISE = frozenset("SGD Adam AdamW Adamax Nadam Adagrad Adadelta RMSprop Ftrl Lion ScheduleFreeAdamW".split())


def updates_elements_apart(optimizer: Any) -> bool:
    """Returns whether each element's update depends on this element alone, so that variables may be split and joined.

    Clipping by norms, which looks at whole gradients, is not considered.

    Args:
        optimizer: a Keras optimizer; the user's own are not known to be elementwise.
    """
    return type(optimizer).__module__.startswith("keras.") and type(optimizer).__name__ in _ELEMENTWISE


def clips_itself(optimizer: Any) -> bool:
    """Returns whether an optimizer's class overrides Keras's clipping, and may look at the gradients of all variables.

    Args:
        optimizer: a Keras optimizer.
    """
    owner = next(kind for kind in type(optimizer).__mro__ if "_clip_gradients" in vars(kind))
    return not owner.__module__.startswith("keras.")


def apply_count(optimizer: Any) -> Any:
    """Returns the variable that counts calls of ``apply``; with accumulation they are more than ``iterations``."""
    return optimizer._iterations


def learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate: a variable, a schedule or a callable; None if the optimizer has no rate of its own."""
    return getattr(optimizer, "_learning_rate", None)


def variables_of(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer updates; an empty list before it is built."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def averages_of(optimizer: Any) -> list[Any]:
    """Returns the moving averages that an optimizer keeps of its variables; an empty list without ``use_ema``."""
    return list(getattr(optimizer, "_model_variables_moving_average", None) or ())


def accumulated_by(optimizer: Any) -> list[Any]:
    """Returns the sums of gradients that an optimizer accumulates, in the order of its variables."""
    return list(getattr(optimizer, "_accumulated_gradients", None) or ())


def place_of(optimizer: Any, variable: Any) -> int:
    """Returns the place of a variable among those that the optimizer updates."""
    place: int = optimizer._get_variable_index(variable)
    return place


def key_of(variable: Any) -> str:
    """Returns the key by which optimizers find a variable, of Keras or TensorFlow; no other variable ever gets it."""
    key: str = tf_optimizer.TFOptimizer._var_key(None, variable)
    return key


def decays(optimizer: Any, variable: Any) -> bool:
    """Returns whether the optimizer applies weight decay to a variable."""
    return bool(optimizer._use_weight_decay(variable))


def strategy_of(optimizer: Any, otherwise: Any = None) -> Any:
    """Returns the strategy that an optimizer was made under."""
    return getattr(optimizer, "_distribution_strategy", otherwise)


def clipped(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns gradients clipped by the optimizer's settings."""
    return list(optimizer._clip_gradients(gradients))
