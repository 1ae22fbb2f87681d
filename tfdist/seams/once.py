"""A decorator for functions that install something, and so must run only once, in whichever thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

_lock = threading.RLock()
"""One lock for all installations, reentrant because one feature installs others."""


class Once:
    """A function that runs once; threads that call it meanwhile wait until it has run. Use it as a decorator.

    Strategies may be made in several threads at the same time. Hooks that are added twice would do their work twice.

    Args:
        function: function that installs something. If it raises, the next call runs it again.

    Attributes:
        is_done: whether the function has run.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.is_done = False

    def __call__(self) -> None:
        """Runs the function, unless it has run before."""
        with _lock:
            if not self.is_done:
                self._function()
                self.is_done = True
