"""Handles Ctrl-C: notices it while the main thread is in C++, and raises it where it can end something."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

INTERRUPTED = "interrupted (Ctrl-C)"
"""Message of the error with which a job fails when its user has interrupted this process."""

_hooks: set[CodeType] = set()
_last_words: set[CodeType] = set()


class InterruptWatch:
    """A file descriptor that becomes readable when SIGINT arrives.

    Python's signal handlers run on the main thread between two bytecodes, and a training step is one long call. The C
    handler, in contrast, writes a byte to the descriptor of `signal.set_wakeup_fd` at once. If another library uses
    that descriptor already, or off the main thread, this watch is not active.
    """

    def __init__(self) -> None:
        self.active = False
        if threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        previous = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            self._read.close()
            self._write.close()
            return
        self.active = True
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)

    def fileno(self) -> int:
        """Returns the file descriptor, for a selector."""
        return self._read.fileno()

    def interrupted(self) -> bool:
        """Returns whether SIGINT has arrived and its handler raises KeyboardInterrupt."""
        try:
            arrived = self._read.recv(64)
        except BlockingIOError:
            return False
        return signal.SIGINT in arrived and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, interrupt)

    def close(self) -> None:
        """Restores the default wakeup descriptor and signal handler."""
        if self.active and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGINT) is interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.active:
            self.active = False
            self._read.close()
            self._write.close()


def excepthook(
    last_words: Callable[[BaseException, TracebackType | None], bool], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns an excepthook that SIGINT does not interrupt before it has told an error: the script has ended already.

    Args:
        last_words: a Python function that takes the error and its traceback, tells whom it concerns, and returns
            whether that is all.
        original: the excepthook that is called otherwise. It can be interrupted, because it may be a debugger.
    """

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not last_words(error, traceback):
            original(kind, error, traceback)

    _hooks.add(hook.__code__)
    _last_words.add(last_words.__code__)
    return hook


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt on SIGINT like Python's handler, except in three places.

    An interrupt makes the running step fail, so this handler often runs in the constructor of the error that
    TensorFlow raises for that step. Before Python 3.12, pybind11 turns an exception in a constructor into a
    RuntimeError. An exception in a destructor is printed and dropped. In both cases the interrupt is postponed to the
    next call or return outside. At the end of a process (see `excepthook`) there is nothing left to interrupt.
    """
    if frame is not None and _is_at_the_end(frame):
        return
    if frame is not None and _would_be_lost(frame) and sys.getprofile() is None:
        sys.setprofile(_raise_outside)
    else:
        signal.default_int_handler(number, frame)


def _raise_outside(frame: FrameType, event: str, argument: Any) -> None:
    if not _would_be_lost(frame):
        sys.setprofile(None)
        if not _is_at_the_end(frame):
            raise KeyboardInterrupt


def _is_at_the_end(frame: FrameType) -> bool:
    return frame.f_code in _hooks or any(call.f_code in _last_words for call in _calls(frame))


def _would_be_lost(frame: FrameType) -> bool:
    for call in _calls(frame):
        name = call.f_code.co_name
        if name == "__del__" or (name == "__init__" and isinstance(call.f_locals.get("self"), BaseException)):
            return True
    return False


def _calls(frame: FrameType) -> Iterator[FrameType]:
    call: FrameType | None = frame
    while call is not None:
        yield call
        call = call.f_back
