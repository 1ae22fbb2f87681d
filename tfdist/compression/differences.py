"""Compression of the differences between a sender's values and those that its receiver has.

The sender keeps a copy of what the receiver has decoded. So what an encoding lacks is in the next difference, and the
two never drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tfdist.compression.feedback import ErrorFeedback, WithoutFeedback
from tfdist.compression.method import Method, as_working, is_finite
from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.compression.state import State


def as_contraction(method: Method) -> Method:
    """Returns a method in the form that differences need.

    The noise of an unbiased method is in the next difference, too, which must not grow. So the method is made a
    contraction, as by error feedback.

    Args:
        method: any method.

    Raises:
        TypeError: the method takes no error feedback, for example because it keeps a residual of its own, or is to do
            without.
    """
    if isinstance(method, WithoutFeedback):
        raise TypeError(f"what an encoding lacks is always in the next difference; pass {method.method!r} itself")
    return method if isinstance(method, ErrorFeedback) else ErrorFeedback(method)


def suited_choice(choice: Choice, who: str) -> Method:
    """Returns the method that a user has chosen, in the form that differences need.

    Args:
        choice: any choice but None.
        who: name of the object that compresses differences, for messages.

    Raises:
        ValueError: the choice cannot compress differences.
    """
    try:
        if isinstance(choice, Method) and not choice.momentum:
            return as_contraction(choice)
    except TypeError as error:
        raise ValueError(f"{who} cannot compress with {choice}: {error}") from None
    raise ValueError(f"{who} cannot compress with {choice}, which is only for gradients that all processes sum")


def suited(schedules: Iterable[Schedule | None], who: str) -> dict[Choice, Method]:
    """Returns the method for each choice of schedules, in the form that differences need.

    Args:
        schedules: schedule of each variable; None for a variable that is not compressed.
        who: name of the object that compresses differences, for messages.

    Raises:
        ValueError: a choice cannot compress differences.
    """
    choices = [choice for schedule in schedules if schedule is not None for choice in schedule.choices]
    return {choice: suited_choice(choice, who) for choice in choices if choice is not None}


def check(compression: Choice | Schedule | Policy, who: str) -> None:
    """Checks that differences can be compressed with methods, as far as they are known before the variables.

    Args:
        compression: ``compression`` argument of a strategy. A policy is not checked, because it chooses by variables.
        who: name of the object that compresses differences, for messages.

    Raises:
        ValueError: a choice cannot compress differences.
    """
    choices = compression.choices if isinstance(compression, Schedule) else [compression]
    for choice in choices:
        if choice is not None and not isinstance(choice, Policy):
            suited_choice(choice, who)


def advance(method: Method, values: np.ndarray, has: np.ndarray, state: State) -> np.ndarray | None:
    """Encodes the difference between values and the receiver's, and updates the copy of the latter.

    Args:
        method: method that `as_contraction` returned.
        values: an array; only read.
        has: copy of what the receiver has, flat, in the dtype of `base`; updated.
        state: state of the encoding.

    Returns:
        The payload, which the receiver adds to what it has; None if the values are not finite, and nothing is changed.
    """
    difference = as_working(values.reshape(-1)) - has
    if not is_finite(difference):
        return None
    state.arrays.pop("residual", None)  # the difference contains it
    payload = method.encode(difference, state)
    state.step += 1
    method.decode(payload, has, np.add)
    return payload


def base(array: np.ndarray) -> np.ndarray:
    """Returns a flat copy of values, in the dtype in which they are encoded.

    Args:
        array: array of floating-point numbers.
    """
    return np.array(as_working(array.reshape(-1)))
