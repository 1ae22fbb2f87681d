"""Differences in fewer bytes, along one line: what values differ by from those that the other end has.

The sender keeps what the receiver has, which is what the receiver has decoded. So what an encoding lacks is in the next
difference, and the two never drift apart.
"""

from __future__ import annotations

import numpy as np

from tfdist.compression.feedback import ErrorFeedback
from tfdist.compression.method import Method, as_working, is_finite
from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.compression.state import State


def suited(method: Method) -> Method:
    """A method as differences need it.

    The noise of an unbiased method is in the next difference, too, which must not grow. So the method is made a
    contraction, as error feedback does it.

    Args:
        method: any.

    Raises:
        TypeError: it keeps a residual of its own.
    """
    return method if isinstance(method, ErrorFeedback) else ErrorFeedback(getattr(method, "method", method))


def suited_choice(choice: Choice, who: str) -> Method:
    """As `suited`, for what a user has chosen.

    Args:
        choice: any but None.
        who: is to compress differences, for messages.

    Raises:
        ValueError: it is none for differences.
    """
    try:
        if isinstance(choice, Method) and not choice.momentum:
            return suited(choice)
    except TypeError as error:
        raise ValueError(f"{who} cannot compress with {choice}: {error}") from None
    raise ValueError(f"{who} cannot compress with {choice}, which is for gradients that all processes add up")


def check(compression: Choice | Schedule | Policy, who: str) -> None:
    """Checks that differences can be compressed with methods, as far as they are known before the variables.

    Args:
        compression: as of `tfdist.AllReduceStrategy`; a policy chooses by variables.
        who: is to compress differences, for messages.

    Raises:
        ValueError: they cannot.
    """
    choices = compression.choices if isinstance(compression, Schedule) else [compression]
    for choice in choices:
        if choice is not None and not isinstance(choice, Policy):
            suited_choice(choice, who)


def advance(method: Method, values: np.ndarray, has: np.ndarray, state: State) -> np.ndarray | None:
    """Encodes a difference, and gives the kept values what the receiver then has.

    Args:
        method: which is `suited`.
        values: an array; only read.
        has: what the receiver has, flat, in the dtype of `base`; changed.
        state: of the encoding.

    Returns:
        The payload, which the receiver adds to what it has; None if the values are not finite, and nothing is changed.
    """
    difference = as_working(values.reshape(-1)) - has
    if not is_finite(difference):
        return None
    state.arrays.pop("residual", None)  # it is in the difference
    payload = method.encode(difference, state)
    state.step += 1
    method.decode(payload, has, np.add)
    return payload


def base(array: np.ndarray) -> np.ndarray:
    """A flat copy of values, in the dtype in which they are encoded.

    Args:
        array: of floating-point numbers.
    """
    return np.array(as_working(array.reshape(-1)))
