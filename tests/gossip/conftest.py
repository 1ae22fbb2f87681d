import time

from tests.engine.ranks import ranks  # noqa: F401  (a fixture)


def until(function, deadline=120.0):
    """Waits until a function returns something."""
    end = time.monotonic() + deadline
    while (value := function()) is None:
        assert time.monotonic() < end, "it does not come"
    return value
