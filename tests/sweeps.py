"""Parameters of tests that only a sweep runs (`make test-all`): further values of what others show already."""

import itertools

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


def crossed(*parameters):
    """All combinations of the values of parameters; those that are always run have each value beside each of another.

    Each combination of all but the last parameter is always run with one value of the last one, which take turns.

    Args:
        parameters: the values of each parameter.
    """
    for places in itertools.product(*map(range, map(len, parameters))):
        values = [given[place] for given, place in zip(parameters, places, strict=True)]
        yield (sweep if sum(places) % len(parameters[-1]) else pytest.param)(*values)
