"""The processes' outputs: shown at once with the process's name before each line, or kept in case the process fails."""

from __future__ import annotations

import os
import re
import selectors
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import BinaryIO

KEPT_LINES = 400
"""Number of lines that are kept of a process whose output is not shown."""

_LONGEST_LINE = 1 << 16
_LEFT_IN_A_PIPE = 1 << 20
"""Maximum bytes in a pipe (Linux, `/proc/sys/fs/pipe-max-size`)."""

_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass
class OutputTail:
    """The last lines of a process's output, and the file with the whole output, if there is one.

    Attributes:
        lines: the last lines.
        count: number of all lines.
        log: file that the whole output is written to; None without a file.
    """

    lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    count: int = 0
    log: BinaryIO | None = None


@dataclass
class _Pipe:
    """The reading end of one process's output.

    Attributes:
        name: name of the process.
        target: stream that the lines are shown on; None if they are kept.
        pending: beginning of a line whose end has not been read.
    """

    name: str
    target: BinaryIO | None
    pending: bytes = b""


class Outputs:
    """Reads the outputs of all processes, on one thread.

    Args:
        log_folder: folder for the whole of each kept output; None writes none.
    """

    def __init__(self, log_folder: str | None = None) -> None:
        self.kept: dict[str, OutputTail] = {}
        self._log_folder = log_folder
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read, name="tfdist-outputs", daemon=True)

    def show(self, name: str, fd: int, target: BinaryIO) -> None:
        """Shows the lines from a pipe, with the name before each."""
        self._add(fd, _Pipe(name, target))

    def keep(self, name: str, fd: int) -> None:
        """Keeps the last lines from a pipe; a restarted process's lines follow its earlier ones."""
        if name not in self.kept:
            log = open(self.log_path(name), "wb") if self._log_folder else None  # noqa: SIM115 — closed in finish
            self.kept[name] = OutputTail(log=log)
        self._add(fd, _Pipe(name, None))

    def log_path(self, name: str) -> str:
        """Returns the path of the file with a process's whole output, if a folder was given."""
        return os.path.join(self._log_folder or "", f"{name.replace(' ', '-')}.log")

    def start(self) -> None:
        """Starts the reading thread."""
        self._thread.start()

    def finish(self) -> None:
        """Reads the rest of the pipes, once their processes have ended."""
        os.write(self._waker, b"\0")
        if self._thread.ident is not None:
            self._thread.join()
        for kept in self.kept.values():
            if kept.log:
                kept.log.close()

    def _add(self, fd: int, pipe: _Pipe) -> None:
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, pipe)

    def _read(self) -> None:
        finishing = False
        while not finishing:
            for key, _ in self._selector.select():
                if key.data is None:
                    finishing = True
                else:
                    self._read_once(key.fd, key.data)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._read_rest(key.fd, key.data)

    def _read_once(self, fd: int, pipe: _Pipe) -> int:
        """Reads from a pipe. Returns the number of bytes; 0 at the end of the pipe, and if the pipe is empty now."""
        if fd not in self._selector.get_map():  # closed in the meantime
            return 0
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return 0
        self._take(pipe, chunk)
        if not chunk:
            self._close(fd)
        return len(chunk)

    def _read_rest(self, fd: int, pipe: _Pipe) -> None:
        """Reads a pipe until it is empty, not to its end, because a child of the process may hold it open forever."""
        left = _LEFT_IN_A_PIPE
        while left > 0 and (count := self._read_once(fd, pipe)):
            left -= count
        if pipe.pending:
            self._take(pipe, b"")

    def _take(self, pipe: _Pipe, chunk: bytes) -> None:
        """Splits a chunk into lines; an empty chunk ends the last line."""
        if pipe.target is None and (log := self.kept[pipe.name].log):
            log.write(chunk)
            log.flush()
        text = pipe.pending + chunk
        held = b"\r" if chunk and text.endswith(b"\r") else b""  # perhaps the first half of \r\n
        *lines, rest = _LINE_END.split(text.removesuffix(held))
        pipe.pending = rest + held
        if pipe.pending and (not chunk or len(pipe.pending) > _LONGEST_LINE):
            lines.append(pipe.pending)
            pipe.pending = b""
        if lines:
            self._pass_on(pipe, [line + b"\n" for line in lines])

    def _pass_on(self, pipe: _Pipe, lines: list[bytes]) -> None:
        if pipe.target is None:
            kept = self.kept[pipe.name]
            kept.lines.extend(lines)
            kept.count += len(lines)
            return
        try:
            pipe.target.write(b"".join(b"[%b] %b" % (pipe.name.encode(), line) for line in lines))
            pipe.target.flush()
        except OSError:  # the target has no reader any more; closing the pipes lets the processes notice that
            for key in list(self._selector.get_map().values()):
                if key.data is not None and key.data.target is pipe.target:
                    self._close(key.fd)

    def _close(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
            os.close(fd)
