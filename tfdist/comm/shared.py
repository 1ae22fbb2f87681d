"""Memory of a process that the other processes of its machine read where it lies.

Each process holds one anonymous file in memory (a memfd), which grows as it is used and which its neighbours open
through ``/proc``. It has no name, so that nothing is left behind however the processes end.
"""

from __future__ import annotations

import bisect
import mmap
import os
import secrets
import threading
from typing import NamedTuple

import numpy as np

from tfdist.comm.buffers import BufferPool

_TOKEN_BYTES = 16


class Place(NamedTuple):
    """Where bytes lie in an `Arena`: in which region of the file, and from which byte of that region on."""

    region: int
    region_bytes: int
    start: int


class Invitation(NamedTuple):
    """What a neighbour needs to find an `Arena`, and to know that it has found the right one."""

    pid: int
    fd: int
    token: bytes


class Arena(BufferPool):
    """A `BufferPool` whose memory the neighbours can read."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = os.memfd_create("tfdist")
        self._end = 0
        self._growing = threading.Lock()
        self._addresses: list[int] = []
        self._regions: list[tuple[int, np.ndarray]] = []
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._allocate(_TOKEN_BYTES)[:_TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)

    def invitation(self) -> Invitation:
        """What to tell the neighbours."""
        return Invitation(os.getpid(), self._fd, self._token)

    def _allocate(self, nbytes: int) -> np.ndarray:
        with self._growing:
            start = self._end
            size = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self._fd, start + size)
            region = np.frombuffer(mmap.mmap(self._fd, size, offset=start), np.uint8)
            self._end += size
            at = bisect.bisect(self._addresses, region.ctypes.data)
            self._regions.insert(at, (start, region))
            self._addresses.insert(at, region.ctypes.data)
            return region

    def find(self, array: np.ndarray) -> Place | None:
        """Where an array lies in the file; None if it lies elsewhere."""
        address = array.__array_interface__["data"][0]
        at = bisect.bisect(self._addresses, address) - 1
        if at < 0:
            return None
        start, region = self._regions[at]
        within = address - self._addresses[at]
        return Place(start, region.size, within) if within + array.nbytes <= region.size else None


class Neighbour:
    """The memory of another process of this machine, to be read.

    Args:
        invitation: from its `Arena`.

    Raises:
        OSError: its memory cannot be opened: it runs in another container, or as another user.
    """

    def __init__(self, invitation: Invitation) -> None:
        self._fd = os.open(f"/proc/{invitation.pid}/fd/{invitation.fd}", os.O_RDONLY)
        self._regions: dict[int, np.ndarray] = {}
        if os.pread(self._fd, _TOKEN_BYTES, 0) != invitation.token:
            os.close(self._fd)
            raise OSError(f"process {invitation.pid} here is another one than there")

    def view(self, place: Place, nbytes: int) -> np.ndarray:
        """What lies at a place, as bytes."""
        region = self._regions.get(place.region)
        if region is None:
            mapping = mmap.mmap(self._fd, place.region_bytes, prot=mmap.PROT_READ, offset=place.region)
            region = self._regions[place.region] = np.frombuffer(mapping, np.uint8)
        return region[place.start : place.start + nbytes]
