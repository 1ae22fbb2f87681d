"""Values that each thread has for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadValue(threading.local, Generic[T]):
    """A value that a context replaces for the calling thread.

    Args:
        default: the value of a thread outside of such contexts.

    Attributes:
        value: the calling thread's value.
    """

    def __init__(self, default: T) -> None:  # called once more for each thread that reads the value
        self.value = default

    @contextlib.contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Context in which the calling thread has another value."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
