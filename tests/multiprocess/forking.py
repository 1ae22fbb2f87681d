"""Processes that need not import TensorFlow and tfdist, as they are forks of one that has (`preloaded.py`).

An import takes seconds, and the suite starts hundreds of processes. A fork differs from a new process in what it shares
with its siblings: modules that are loaded, not yet used, and the hashes of strings. So ranks that follow each other
are forks of different processes, whose sets have different orders. Launches by `tfdist run`, and programs that do not
import TensorFlow by themselves, remain processes from the start.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = Path(__file__).parent / "preloaded.py"
PARENTS = 2
READ_AT_START = ("PYTHON", "LD_", "OMP_", "OPENBLAS_", "TF_CPP_", "TF_ENABLE_", "CUDA_", "KERAS_")
"""Variables of the environment that Python, the loader, and libraries read when they are loaded."""


def applies(command: Sequence[str], settings: Mapping[str, str]) -> bool:
    """Whether a fork does the same: the command is a script with TensorFlow, and no setting comes too late.

    On other systems than Linux, libraries may not survive a fork.
    """
    script = Path(command[0])
    if sys.platform != "linux" or script.suffix != ".py" or any(name.startswith(READ_AT_START) for name in settings):
        return False
    return re.search(r"^(import|from) (keras|tensorflow)\b", script.read_text(), re.MULTILINE) is not None


class Forked:
    """What `subprocess.Popen` is, as far as the harness needs it."""

    def __init__(self, parent: "Parent", pid: int) -> None:
        self._parent = parent
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code (minus the signal's number if it was killed); None while the process runs."""
        if self.returncode is None:
            self.returncode = self._parent.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Waits for the end, at most ``timeout`` seconds; raises `subprocess.TimeoutExpired` after that."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code


class Parent:
    """A process that has imported TensorFlow; it ends with this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        connection, given = socket.socketpair()
        with given:
            command = [sys.executable, str(PRELOADED)]
            self._process = subprocess.Popen(command, stdin=given, env=dict(environment), start_new_session=True)
        self.pid = self._process.pid
        self._connection = connection
        self._answers = connection.makefile("r")
        self._lock = threading.Lock()

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> Forked:
        """Runs a script with its arguments; what it writes is added to the file ``output``."""
        pid = self.ask(command=list(command), environment=dict(environment), output=str(output), folder=os.getcwd())
        assert pid is not None
        return Forked(self, pid)

    def ask(self, **request: object) -> int | None:
        with self._lock:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            answer = self._answers.readline()
        assert answer, f"{PRELOADED.name} has ended with {self._process.wait(60)}; its errors are above"
        return json.loads(answer)


_parents: list[Parent] = []
_starting = threading.Lock()


def parents() -> list[Parent]:
    """Those that have been started."""
    return list(_parents)


def start(rank: int, command: Sequence[str], environment: Mapping[str, str], output: Path) -> Forked:
    """Starts a rank as a fork; of which parent depends on the rank."""
    with _starting:
        if not _parents:
            _parents.extend(Parent(environment) for _ in range(PARENTS))  # that import at the same time
    return _parents[rank % PARENTS].start(command, environment, output)
