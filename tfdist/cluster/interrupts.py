"""Notices Ctrl-C while the main thread sits in C++ and Python cannot run its handler."""

from __future__ import annotations

import signal
import socket
import threading


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
        else:
            self.active = True

    def fileno(self) -> int:
        """For a selector."""
        return self._read.fileno()

    def interrupted(self) -> bool:
        """Whether SIGINT came, and would have raised KeyboardInterrupt."""
        try:
            arrived = self._read.recv(64)
        except BlockingIOError:
            return False
        return signal.SIGINT in arrived and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def close(self) -> None:
        """Gives the wakeup descriptor back."""
        if self.active and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        if self.active:
            self.active = False
            self._read.close()
            self._write.close()
