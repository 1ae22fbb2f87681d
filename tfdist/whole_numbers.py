"""Whole numbers among the arguments that users give."""

from __future__ import annotations


def check(what: str, value: object, least: int = 1) -> None:
    """Checks that an argument is a whole number.

    Args:
        what: name of the argument, for the message.
        value: the argument.
        least: smallest number that is allowed.

    Raises:
        ValueError: the argument is not a whole number, or is less than ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} must be a whole number of at least {least}; got {value!r}")
