"""Options as text: calls of tfdist's own classes with literal arguments, which are read without executing anything."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

_MOST_CHARACTERS = 1 << 16


class ExpressionError(ValueError):
    """A text is not an expression that `read` understands."""


def read(text: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Returns the object that a text describes, such as ``skip_small(TopK(ratio=0.01), elements=1024)``.

    The text may have literals, dictionaries, lists, tuples, and calls of known functions and classes.

    Args:
        text: expression, as `repr` yields it.
        known: functions and classes that may be called, by name.

    Raises:
        ExpressionError: the text contains something else, or a call does not take its arguments.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters; expected at most {_MOST_CHARACTERS}")
    try:
        return _value(ast.parse(text, mode="eval").body, known)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{text[:200]!r} cannot be read: {error}") from None


def _value(node: ast.expr, known: Mapping[str, Callable[..., Any]]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.Dict(keys, values) if all(key is not None for key in keys):
            pairs = zip(keys, values, strict=True)
            return {_value(key, known): _value(child, known) for key, child in pairs if key is not None}
        case ast.List(items):
            return [_value(child, known) for child in items]
        case ast.Tuple(items):
            return tuple(_value(child, known) for child in items)
        case ast.Call(ast.Name(name), arguments, keywords) if name in known and all(child.arg for child in keywords):
            named = {str(child.arg): _value(child.value, known) for child in keywords}
            return known[name](*(_value(child, known) for child in arguments), **named)
    raise ExpressionError(f"{ast.unparse(node)[:200]} is not one of tfdist's own choices with literal arguments")
