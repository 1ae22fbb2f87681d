"""Shows notices to the user, and suppresses misleading TensorFlow logs."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

log = logging.getLogger("tfdist")

_said: dict[tuple[object, ...], object] = {}
"""What has been said once, and a mark of the thread that said it."""


def notice(text: str, *arguments: object) -> None:
    """Shows a notice: as an INFO record if the program has configured logging, else on stderr.

    By default Python's logging shows only warnings, and an additional handler would repeat the lines of the program's
    handlers.

    Args:
        text: format string, as for `logging`.
        *arguments: arguments of the format string.
    """
    if log.hasHandlers() or log.level > logging.INFO:
        log.info(text, *arguments)
    else:
        say(text % arguments)


def notice_once(text: str, *arguments: object) -> None:
    """Shows a notice as `notice` does, if this process has not shown the same one before."""
    if _is_new(text, *arguments):
        notice(text, *arguments)


def warn_once(text: str, *arguments: object) -> None:
    """Logs a warning, if this process has not logged the same one before."""
    if _is_new(text, *arguments):
        log.warning(text, *arguments)


def forget() -> None:
    """Lets what has been said once be said again; for tests."""
    _said.clear()


def _is_new(*said: object) -> bool:
    mark = object()
    return _said.setdefault(said, mark) is mark


def say(line: str) -> None:
    """Writes a line to stderr in one piece, because other threads may be writing, too.

    On unbuffered streams, such as under `tfdist run`, `print` writes the end of the line separately.
    """
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def without_mirrored() -> Iterator[None]:
    """Suppresses TensorFlow's logs about `MirroredStrategy`, such as that it ignores TF_CONFIG, which is wrong here."""

    def is_true(record: logging.LogRecord) -> bool:
        return "MirroredStrategy" not in record.getMessage()

    logger = logging.getLogger("tensorflow")
    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
