"""Notices to the user, and suppression of misleading TensorFlow logs."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

log = logging.getLogger("tfdist")


def notice(text: str, *arguments: object) -> None:
    """Shows a notice: as an INFO record if the program has configured logging, else on stderr.

    By default Python's logging shows only warnings, and an additional handler would repeat what the program's handlers
    show.

    Args:
        text: a format string, as for `logging`.
        *arguments: its arguments.
    """
    if log.hasHandlers() or log.level > logging.INFO:
        log.info(text, *arguments)
    else:
        say(text % arguments)


def say(line: str) -> None:
    """Writes a line to stderr in one piece, as other threads may be writing, too.

    `print` writes the end of the line by itself where streams are unbuffered, such as under `tfdist run`.
    """
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def without_mirrored() -> Iterator[None]:
    """Suppresses TensorFlow's logs about `MirroredStrategy`, such as that TF_CONFIG is ignored, which is wrong here."""

    def is_true(record: logging.LogRecord) -> bool:
        return "MirroredStrategy" not in record.getMessage()

    logger = logging.getLogger("tensorflow")
    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
