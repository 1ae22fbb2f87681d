"""Options whose text shows only what differs from the defaults."""

from __future__ import annotations

import dataclasses
from typing import Any


class Concise:
    """Base of dataclasses, made with ``repr=False``, whose text leaves out fields that have their defaults."""

    def __repr__(self) -> str:
        given = [field for field in dataclasses.fields(self) if self._is_given(field)]  # type: ignore[arg-type]
        shown = ", ".join(f"{field.name}={text_of(getattr(self, field.name))}" for field in given)
        return f"{type(self).__qualname__}({shown})"

    def _is_given(self, field: dataclasses.Field[Any]) -> bool:
        return field.default is dataclasses.MISSING or bool(getattr(self, field.name) != field.default)


def text_of(value: object) -> str:
    """Returns a value as text that is equal in all processes, unlike a default `repr`, which contains an address.

    Args:
        value: value of an option.
    """
    return type(value).__qualname__ if type(value).__repr__ is object.__repr__ else repr(value)
