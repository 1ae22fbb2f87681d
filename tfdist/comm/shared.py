"""Memory of a process that the other processes of its machine can read.

Each process has one anonymous file in memory (a memfd), which grows as it is used and which its neighbours open
through ``/proc``. It has no name, so nothing is left behind, however the processes end.
"""

from __future__ import annotations

import bisect
import mmap
import os
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tfdist.comm.buffers import BufferPool

_TOKEN_BYTES = 16


class Place(NamedTuple):
    """The location of bytes in an `Arena`: a region of the file, and the offset in that region."""

    region: int
    region_bytes: int
    start: int


class Invitation(NamedTuple):
    """The information a neighbour needs to open an `Arena` and to verify that it is the right one."""

    pid: int
    fd: int
    token: bytes


class _Region(NamedTuple):
    """A part of the file that is mapped at once.

    Attributes:
        address: the address in this process.
        start: the offset in the file.
        memory: the mapped bytes.
    """

    address: int
    start: int
    memory: np.ndarray


_REGION_BYTES = 1 << 28
"""The minimum that is mapped at once. Every mapping keeps a file descriptor; memory is allocated on first access."""


class Arena(BufferPool):
    """A `BufferPool` whose memory the neighbours can read."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = os.memfd_create("tfdist")
        self._end = 0
        self._growing = threading.Lock()
        self._regions: tuple[_Region, ...] = ()  # by address; replaced as a whole, as `find` takes no lock
        self._rest = np.empty(0, np.uint8)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._allocate(_TOKEN_BYTES)[:_TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)

    def invitation(self) -> Invitation:
        """Returns the information for the neighbours."""
        return Invitation(os.getpid(), self._fd, self._token)

    def _allocate(self, nbytes: int) -> np.ndarray:
        pages = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        with self._growing:
            if pages > self._rest.size:
                self._rest = self._map(max(pages, _REGION_BYTES))
            taken, self._rest = self._rest[:pages], self._rest[pages:]
            return taken

    def _map(self, nbytes: int) -> np.ndarray:
        start = self._end
        os.ftruncate(self._fd, start + nbytes)
        memory = np.frombuffer(mmap.mmap(self._fd, nbytes, offset=start), np.uint8)
        self._end += nbytes
        region = _Region(memory.ctypes.data, start, memory)
        self._regions = tuple(sorted((*self._regions, region), key=_address))
        return memory

    def find(self, array: np.ndarray) -> Place | None:
        """Returns the location of an array in the file; None if it is not in the file."""
        address, regions = array.__array_interface__["data"][0], self._regions
        at = bisect.bisect(regions, address, key=_address) - 1
        if at < 0:
            return None
        begin, start, memory = regions[at]
        within = address - begin
        return Place(start, memory.size, within) if within + array.nbytes <= memory.size else None


def _address(region: _Region) -> int:
    return region.address


class Neighbour:
    """The readable memory of another process of this machine.

    Args:
        invitation: the invitation of its `Arena`.

    Raises:
        OSError: its memory cannot be opened, because it runs in another container or as another user.
    """

    def __init__(self, invitation: Invitation) -> None:
        path = f"/proc/{invitation.pid}/fd/{invitation.fd}"
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # may be any file of an unrelated process
        self._regions: dict[int, np.ndarray] = {}
        try:
            token = os.pread(self._fd, _TOKEN_BYTES, 0)
        except OSError:
            token = b""
        if token != invitation.token:
            os.close(self._fd)
            raise OSError(f"process id {invitation.pid} is another process in this container")

    def close(self) -> None:
        """Unmaps the memory; no view of it may be used any more."""
        self._regions.clear()
        os.close(self._fd)

    def view(self, place: Place, nbytes: int) -> np.ndarray:
        """Returns the bytes at a location."""
        region = self._regions.get(place.region)
        if region is None:
            mapping = mmap.mmap(self._fd, place.region_bytes, prot=mmap.PROT_READ, offset=place.region)
            region = self._regions[place.region] = np.frombuffer(mapping, np.uint8)
        return region[place.start : place.start + nbytes]


class SharedMemory:
    """The memory that a process and its neighbours read.

    Args:
        arena: this process's memory.
        neighbours: by rank, the memory of others.
        adders: the ranks of both that have machine code which sums in this memory.
    """

    def __init__(self, arena: Arena, neighbours: Mapping[int, Neighbour], adders: Collection[int]) -> None:
        self._arena, self._neighbours, self._adders = arena, neighbours, adders

    def is_summed(self, members: Iterable[int]) -> bool:
        """Returns whether these ranks can sum in this memory: the same on all of them."""
        return all(rank in self._adders for rank in members)

    def place(self, array: np.ndarray) -> Place:
        """Returns the location of memory of this process's arena."""
        place = self._arena.find(array)
        assert place is not None
        return place

    def view(self, rank: int, place: Place, nbytes: int) -> np.ndarray:
        """Returns another rank's memory at a location, which can be read only."""
        return self._neighbours[rank].view(place, nbytes)
