"""Memory that processes of one user on one machine share: a file without a name.

Others open it through its maker's entry in ``/proc``, which lets only the same user in. Nothing is left behind by
processes that are killed.
"""

from __future__ import annotations

import mmap
import os
import secrets

import msgspec

_FOLDER = "/dev/shm"
_NAME = "tfdist-shared"
_LINKS = f"/memfd:{_NAME}", f"{_FOLDER}/#"
HEAD_BYTES = 64
"""At the beginning, which are not the user's; the rest is aligned to as many."""
_TOKEN_BYTES = 16


class Where(msgspec.Struct, frozen=True):
    """Where a process finds the memory of another one.

    Attributes:
        process: the maker's number.
        opened: the number that the open file has there.
        token: random bytes at the beginning of the memory; other machines have processes of that number, too.
    """

    process: int
    opened: int
    token: bytes

    def close(self) -> None:
        """Frees the number, when all have mapped the memory; in the process that has made it."""
        os.close(self.opened)


def make(size: int, is_reserved: bool) -> tuple[mmap.mmap, Where]:
    """Makes memory, full of zeros, behind its first `HEAD_BYTES`.

    Args:
        size: bytes.
        is_reserved: whether it has to be there now, within what ``/dev/shm`` may take, as a page that cannot be had
            later is a SIGBUS. Otherwise it grows as it is used, up to what the machine has.

    Raises:
        OSError: this system has no such files, or no memory is left.
    """
    opened = _reservable() if is_reserved else _growing()
    try:
        if is_reserved:
            os.posix_fallocate(opened, 0, size)
        else:
            os.ftruncate(opened, size)
        mapped = mmap.mmap(opened, size)
    except OSError:
        os.close(opened)
        raise
    token = secrets.token_bytes(_TOKEN_BYTES)
    mapped[:_TOKEN_BYTES] = token
    return mapped, Where(os.getpid(), opened, token)


def _growing() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    return os.memfd_create(_NAME, os.MFD_CLOEXEC)


def _reservable() -> int:
    if not hasattr(os, "O_TMPFILE"):
        raise OSError("this system has no files without names")
    return os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def mapped(where: Where, size: int) -> mmap.mmap | None:
    """Maps memory that another process has made.

    Args:
        where: as its maker says.
        size: as its maker should have made it.

    Returns:
        None if this process cannot open it: the other one is on another machine, in another container, or of another
        user, or this is none of its memory.
    """
    path = f"/proc/{where.process:d}/fd/{where.opened:d}"
    try:
        if not os.readlink(path).startswith(_LINKS):
            return None
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(own).st_size != size:
            return None
        found = mmap.mmap(own, size)
    except OSError:
        return None
    finally:
        os.close(own)
    return found if found[:_TOKEN_BYTES] == where.token else None
