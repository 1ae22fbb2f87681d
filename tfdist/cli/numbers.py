"""Types of the command line's arguments that are numbers."""

from __future__ import annotations

import argparse
import functools


def count(text: str, least: int = 0) -> int:
    """Returns a whole number.

    Args:
        text: the argument.
        least: the least number, which is not negative.

    Raises:
        ArgumentTypeError: the text is not such a number.
    """
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


positive = functools.partial(count, least=1)
"""Returns a whole number of at least 1; see `count`."""


def seconds(text: str) -> float:
    """Returns a number of seconds above 0.

    Raises:
        ArgumentTypeError: the text is not such a number.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return number
