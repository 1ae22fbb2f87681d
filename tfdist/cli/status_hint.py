"""How to look at the parameter servers of a `tfdist run`: their address, and a file with the job's secret."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence

from tfdist.cluster.spec import Task


@contextlib.contextmanager
def told(tasks: Sequence[Task], secret: str) -> Iterator[None]:
    """Context of a job. If it has parameter servers, the command that looks at them is shown on stderr.

    The secret itself is not shown, as logs are kept: it is in a file that only this user may read, while the job runs.

    Args:
        tasks: of the job.
        secret: of the job.
    """
    server = next((task for task in tasks if task.job == "ps"), None)
    if server is None:
        yield
        return
    with _kept(secret) as path:
        command = f"TFDIST_SECRET_FILE={shlex.quote(path)} tfdist status {server.address}"
        print(f"tfdist run: `{command}` shows what the parameter servers do.", file=sys.stderr, flush=True)
        yield


@contextlib.contextmanager
def _kept(secret: str) -> Iterator[str]:
    """Context in which a secret is in a file that only this user may read.

    On Linux it is in memory, and goes with this process, even if that is killed.

    Returns:
        The file's path.
    """
    path = None
    try:
        descriptor = os.memfd_create("tfdist-secret")
    except (AttributeError, OSError):  # another system, or it is forbidden
        descriptor, path = tempfile.mkstemp(prefix="tfdist-secret-")
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            file.write(secret)
            file.flush()
            yield path or f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
