"""Ctrl-C: noticed while the main thread is in C++, and raised where it cannot be lost."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any


class InterruptWatch:
    """A file descriptor that becomes readable when SIGINT arrives.

    Python's handlers run on the main thread between two bytecodes, and a training step is one long call. The
    byte that `signal.set_wakeup_fd` writes comes from the C handler, at once. It is left alone when another
    library uses it already, or off the main thread.
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
        """For a selector."""
        return self._read.fileno()

    def interrupted(self) -> bool:
        """Whether SIGINT came, and raises KeyboardInterrupt."""
        try:
            arrived = self._read.recv(64)
        except BlockingIOError:
            return False
        return signal.SIGINT in arrived and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, interrupt)

    def close(self) -> None:
        """Gives the wakeup descriptor and the handler back."""
        if self.active and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGINT) is interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.active:
            self.active = False
            self._read.close()
            self._write.close()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Python's handler for SIGINT, but for two places in which a KeyboardInterrupt would be lost.

    As an interrupt makes the step fail in which the main thread sits, the handler's turn often comes in the
    constructor of the error that TensorFlow raises for that: pybind11 does not bear that a constructor raises something
    else (before Python 3.12), and makes a RuntimeError of it. And what is raised in a destructor is printed and
    dropped. From there the interrupt is put off to the next call or return outside.
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
