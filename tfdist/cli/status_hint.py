"""Shows how to watch the parameter servers of a `tfdist run`, and keeps the job's secret in a file for that."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence

from tfdist.cluster.spec import Task


@contextlib.contextmanager
def told(tasks: Sequence[Task], secret: bytes) -> Iterator[None]:
    """Returns the context of a job. If it has parameter servers, shows the command that watches them on stderr.

    The secret itself is not shown, because logs are kept. While the job runs, it is in a file that only this user may
    read.

    Args:
        tasks: the job's tasks.
        secret: the job's secret.
    """
    server = next((task for task in tasks if task.job == "ps"), None)
    if server is None:
        yield
        return
    with _kept(secret) as path:
        command = f"TFDIST_SECRET_FILE={shlex.quote(path)} tfdist status {server.address}"
        print(f"tfdist run: `{command}` shows what the parameter servers are doing.", file=sys.stderr, flush=True)
        yield


@contextlib.contextmanager
def _kept(secret: bytes) -> Iterator[str]:
    """Returns a context in which a secret is in a file that only this user may read.

    On Linux the file is in memory, and vanishes with this process, even if the process is killed.

    Yields:
        The file's path.
    """
    path = None
    try:
        descriptor = os.memfd_create("tfdist-secret")
    except (AttributeError, OSError):  # not Linux, or forbidden
        descriptor, path = tempfile.mkstemp(prefix="tfdist-secret-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(secret)
            file.flush()
            yield path or f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
