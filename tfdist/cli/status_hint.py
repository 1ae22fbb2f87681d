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
    descriptor, path = tempfile.mkstemp(prefix="tfdist-secret-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret)
        command = f"TFDIST_SECRET_FILE={shlex.quote(path)} tfdist status {server.address}"
        print(f"tfdist run: `{command}` shows what the parameter servers do.", file=sys.stderr, flush=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
