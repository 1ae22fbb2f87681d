"""Memory that processes of one user on one machine share: a file without a name.

Other processes open it through its maker's entry in ``/proc``, which only the same user can read. Killed processes
leave nothing behind.
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
"""Number of reserved bytes at the beginning, to which the rest is aligned."""
_TOKEN_BYTES = 16


class MemoryLocation(msgspec.Struct, frozen=True):
    """Location at which a process finds the memory of another one.

    Attributes:
        process: process number of the maker.
        opened: number of the open file in that process.
        token: random bytes at the beginning of the memory; on other machines, another process has the same number.
    """

    process: int
    opened: int
    token: bytes

    def close(self) -> None:
        """Closes the file after all processes have mapped it. To be called in the process that has made it."""
        os.close(self.opened)


def make(size: int, is_reserved: bool) -> tuple[mmap.mmap, MemoryLocation]:
    """Makes memory that is filled with zeros behind its first `HEAD_BYTES`.

    Args:
        size: number of bytes, with the reserved ones.
        is_reserved: whether all pages are allocated now, within the limit of ``/dev/shm``: a page that cannot be
            allocated later is a SIGBUS. Otherwise memory grows as it is used, up to what the machine has.

    Raises:
        OSError: this system does not support such memory, or has none left.
    """
    opened = _reservable() if is_reserved else _growing()
    try:
        if is_reserved:
            os.posix_fallocate(opened, 0, size)
        else:
            os.ftruncate(opened, size)
        open_memory = mmap.mmap(opened, size)
    except OSError:
        os.close(opened)
        raise
    token = secrets.token_bytes(_TOKEN_BYTES)
    open_memory[:_TOKEN_BYTES] = token
    return open_memory, MemoryLocation(os.getpid(), opened, token)


def _growing() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    return os.memfd_create(_NAME, os.MFD_CLOEXEC)


def _reservable() -> int:
    if not hasattr(os, "O_TMPFILE"):
        raise OSError("this system has no files without names")
    return os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def open_memory(where: MemoryLocation, size: int) -> mmap.mmap | None:
    """Maps memory that another process has made.

    Args:
        where: location that the maker has sent.
        size: expected number of bytes.

    Returns:
        The memory; None if this process cannot open it: the maker is on another machine, in another container, or of
        another user, or the location is not of such memory.
    """
    path = f"/proc/{where.process:d}/fd/{where.opened:d}"
    try:
        if not os.readlink(path).startswith(_LINKS):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != size:
            return None
        memory = mmap.mmap(descriptor, size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return memory if memory[:_TOKEN_BYTES] == where.token else None
