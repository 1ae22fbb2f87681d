"""What belongs to a thread: values of its own, and who has started it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

_NAME_OF_LIBRARIES_THREADS = "Dummy-"  # the name that Python gives to a thread which it has not started

T = TypeVar("T")


def is_beside_main_thread() -> bool:
    """Returns whether the program has started this thread beside its main thread; TensorFlow's own do not count."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not thread.name.startswith(_NAME_OF_LIBRARIES_THREADS)


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
