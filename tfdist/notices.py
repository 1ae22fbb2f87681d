"""What a user should see without asking for it, and what of TensorFlow's they should not, as it is wrong here."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

log = logging.getLogger("tfdist")


def notice(text: str, *arguments: object) -> None:
    """Says something that is no warning: as an INFO record where the program has set logging up, else on stderr.

    By itself Python's logging shows warnings only, and a handler of our own would repeat what the program's show.

    Args:
        text: with the places of the arguments, as for `logging`.
        *arguments: what belongs there.
    """
    if log.hasHandlers() or log.level > logging.INFO:
        log.info(text, *arguments)
    else:
        print(text % arguments, file=sys.stderr, flush=True)


@contextlib.contextmanager
def without_mirrored() -> Iterator[None]:
    """Leaves out what TensorFlow logs of its `MirroredStrategy`, on which ours stands: that TF_CONFIG is ignored."""

    def is_true(record: logging.LogRecord) -> bool:
        return "MirroredStrategy" not in record.getMessage()

    logger = logging.getLogger("tensorflow")
    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
