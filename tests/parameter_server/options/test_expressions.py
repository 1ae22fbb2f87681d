import pytest

from tfdist.parameter_server.options.expressions import ExpressionError, read


def pair(one, other=None):
    return one, other


def positive(value):
    if value <= 0:
        raise ValueError("it must be above 0")
    return value


KNOWN = {"pair": pair, "positive": positive}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("pair(1, other=pair('a'))", (1, ("a", None))),
        ("{0: None, 5: pair(-0.5, [True, ()])}", {0: None, 5: (-0.5, [True, ()])}),
    ],
)
def test_calls_and_literals_are_read(text, value):
    assert read(text, KNOWN) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "pair.__class__",
        "pair",
        "pair(*[1, 2])",
        "pair(**{'one': 1})",
        "{**{}}",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "1 + 1",
        "f'{1}'",
        "pair(1) if True else 2",
        "object()",
    ],
)
def test_other_python_expressions_are_refused(text):
    with pytest.raises(ExpressionError, match="not one of tfdist's own choices"):
        read(text, KNOWN)


@pytest.mark.parametrize("text", ["pair(", "pair()", "positive(-1)", "1; 2", "(" * 5000, "'" + "x" * (1 << 16) + "'"])
def test_invalid_expressions_raise(text):
    with pytest.raises(ExpressionError):
        read(text, KNOWN)
