"""What is installed once, whichever thread comes first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

_lock = threading.RLock()
"""Of all that is installed, as one feature installs others."""


class Once:
    """A function that runs once; threads that call it meanwhile wait for its end. Use it as a decorator.

    Strategies may be made in several threads at the same time. Hooks that are added twice would do their work twice.

    Args:
        function: that installs something. If it raises, the next call runs it again.

    Attributes:
        is_done: whether it has run.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.is_done = False

    def __call__(self) -> None:
        """Runs the function, unless it has run."""
        with _lock:
            if not self.is_done:
                self._function()
                self.is_done = True
