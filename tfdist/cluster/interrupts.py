"""Handles Ctrl-C: notices it while the main thread is in C++, and raises it where it cannot be lost."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any


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


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt on SIGINT like Python's handler, except in two places where it would be lost.

    An interrupt makes the running step fail, so this handler often runs in the constructor of the error that
    TensorFlow raises for that step. Before Python 3.12, pybind11 turns an exception in a constructor into a
    RuntimeError. An exception in a destructor is printed and dropped. In both cases the interrupt is postponed to the
    next call or return outside.
    """
    if frame is not None and _would_be_lost(frame) and sys.getprofile() is None:
        sys.setprofile(_raise_outside)
    else:
        signal.default_int_handler(number, frame)


def _raise_outside(frame: FrameType, event: str, argument: Any) -> None:
    if not _would_be_lost(frame):
        sys.setprofile(None)
        raise KeyboardInterrupt


def _would_be_lost(frame: FrameType) -> bool:
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_name
        if name == "__del__" or (name == "__init__" and isinstance(at.f_locals.get("self"), BaseException)):
            return True
        at = at.f_back
    return False
