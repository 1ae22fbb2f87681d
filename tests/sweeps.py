"""Parameters of tests that only a sweep runs (`make test-all`): further values of what others show already."""

import pytest


def sweep(*values, **arguments):
    """A parameter that only a sweep runs; as `pytest.param`."""
    return pytest.param(*values, marks=pytest.mark.sweep, **arguments)


def some(cases, every=2, first=0):
    """Parameters of which each ``every``-th is always run, from a first on, and the others in sweeps only.

    Args:
        cases: values, or tuples of them where a case is of several parameters.
        every: so many cases have one that is always run.
        first: place of the first one that is.
    """
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        yield (pytest.param if (place - first) % every == 0 else sweep)(*values)
