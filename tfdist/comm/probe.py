"""Finds out, before MPI starts, which processes of a job can share memory.

Hostnames and process ids are not reliable in containers: two containers may have the same hostname, network and
/dev/shm, but separate PID namespaces. MPICH, which compares hostnames, would then read the memory of an unrelated
process. So each process makes a `Probe.offer` of resources, every other process tries to open them, and `decide`
derives from their findings which processes may share memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.comm.shared import Arena, Invitation, Neighbour

_TOKEN_BYTES = 16
CELLS_VARIABLE = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS"
_CELLS = (64, 16, 4)
"""Messages that MPICH's shared memory holds for one process: its default, and smaller numbers for less space."""
_CELL_BYTES = 17 << 10
_FIXED_BYTES = 32 << 10

Offer = dict[str, Any]
Finding = dict[str, Any]


@dataclass(frozen=True)
class Sharing:
    """The ranks that share memory; the same on all ranks.

    Attributes:
        nodes: by rank, the number of the group in which MPI may use shared memory; None to let MPI decide.
        arenas: by rank, the number of the group whose members read each other's `Arena`.
        sums: by rank, whether it has machine code that sums in that memory.
        cells: by rank, the number of messages that MPI's shared memory has space for; None to let MPI decide.
        reasons: for each two nodes on the same machine, a pair of their ranks and why they share no memory.
    """

    nodes: tuple[int, ...] | None
    arenas: tuple[int, ...]
    sums: tuple[bool, ...]
    cells: tuple[int, ...] | None
    reasons: tuple[tuple[int, int, str], ...] = ()


@dataclass
class Probe:
    """The offer of this process, and its findings about the others.

    Args:
        job: the job's name, unique on every machine at any time.
        rank: this process's rank.
        before_mpi: whether MPI has not started yet. Later its shared memory is known to work, and is not tried.
        sums: whether this process has machine code that sums in the memory of all.
        folder: the directory of MPI's shared memory.
    """

    job: str
    rank: int
    before_mpi: bool = True
    sums: bool = False
    folder: str = "/dev/shm"
    neighbours: dict[int, Neighbour] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._bytes = ctypes.create_string_buffer(self._token, _TOKEN_BYTES)
        self.arena = _make_arena()
        self._made = False
        self._mapping: mmap.mmap | None = None

    def offer(self) -> Offer:
        """Makes the resources that the others try to open; returns their description, for JSON."""
        cells, problem = self._reserve() if self.before_mpi and sys.platform == "linux" else (None, "")
        arena = self.arena and self.arena.invitation()
        return {
            "machine": _boot_id(),
            "pid": os.getpid(),
            "processes": _processes(),
            "address": ctypes.addressof(self._bytes),
            "token": self._token.hex(),
            "arena": arena and [arena.pid, arena.fd, arena.token.hex()],
            "sums": self.sums,
            "cells": cells,
            "problem": problem,
        }

    def try_all(self, offers: Sequence[Offer]) -> Finding:
        """Tries to open the offers of all ranks of this machine.

        Returns:
            For JSON: ``node``, by rank the reason why MPI must not share memory with it, or an empty string;
            ``arena``, the ranks whose `Arena` could be opened.
        """
        node: dict[str, str] = {}
        for other, offer in enumerate(offers):
            if other == self.rank or offer["machine"] != offers[self.rank]["machine"]:
                continue
            node[str(other)] = self._why_not_one_node(other, offer, offers[self.rank])
            if offer["arena"] and self.arena:
                pid, fd, token = offer["arena"]
                try:
                    self.neighbours[other] = Neighbour(Invitation(pid, fd, bytes.fromhex(token)))
                except OSError:
                    pass
        return {"node": node, "arena": sorted(self.neighbours)}

    def keep(self, ranks: Sequence[int]) -> None:
        """Closes the memory of all neighbours but these."""
        for other in set(self.neighbours) - set(ranks):
            self.neighbours.pop(other).close()

    def close(self) -> None:
        """Removes the file that the others tried to open."""
        if self._made:
            self._made = False
            self._mapping = None
            try:
                os.unlink(self._path(self.rank))
            except OSError:
                pass

    def _path(self, rank: int) -> str:
        return f"{self.folder}/{self.job}_{rank}"

    def _reserve(self) -> tuple[int | None, str]:
        """Reserves space for MPI's shared memory in a file, which stays until all have tried: the total then fits."""
        given = os.environ.get(CELLS_VARIABLE, "")
        choice = (int(given),) if given.isdigit() else _CELLS
        try:
            handle = os.open(self._path(self.rank), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            return None, f"its {self.folder} cannot be written ({error.strerror})"
        self._made = True
        try:
            os.write(handle, self._token)
            for cells in choice:
                if _allocate(handle, cells * _CELL_BYTES + _FIXED_BYTES):
                    # Mapped, so that `segments.sweep` of another job on this machine does not remove it.
                    self._mapping = mmap.mmap(handle, _TOKEN_BYTES)
                    return cells, ""
            status = os.statvfs(self.folder)
            free = status.f_bavail * status.f_frsize
        except OSError as error:
            return None, f"its {self.folder} cannot be written ({error.strerror})"
        finally:
            os.close(handle)
        needed = choice[-1] * _CELL_BYTES + _FIXED_BYTES
        return None, f"its {self.folder} has {free >> 10} KiB free, but MPI needs {needed >> 10} KiB for each process"

    def _why_not_one_node(self, other: int, offer: Offer, own: Offer) -> str:
        """Returns why MPI must not share memory with another rank; empty if it may."""
        token = bytes.fromhex(offer["token"])
        if self._made and (why := self._why_not_opened(other, token)):
            return why
        why = read_memory(offer["pid"], offer["address"], token)
        return "they have different PID namespaces" if why and offer["processes"] != own["processes"] else why

    def _why_not_opened(self, other: int, token: bytes) -> str:
        try:
            handle = os.open(self._path(other), os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return f"each has a {self.folder} of its own"
        except OSError as error:
            return f"one cannot open files of the other ({error.strerror}): they run as different users"
        try:
            return "" if os.read(handle, _TOKEN_BYTES) == token else f"each has a {self.folder} of its own"
        finally:
            os.close(handle)


def decide(offers: Sequence[Offer], findings: Sequence[Finding]) -> Sharing:
    """Decides which ranks share memory: every two ranks of a group must have found each other.

    Args:
        offers: every rank's `Probe.offer`.
        findings: every rank's `Probe.try_all`.
    """
    size = len(offers)

    def reason(rank: int, other: int) -> str | None:
        """Returns why two ranks of a machine share no memory; empty if they do, None on different machines."""
        finding = findings[rank]["node"].get(str(other))
        back = findings[other]["node"].get(str(rank))
        return None if finding is None or back is None else finding or back

    nodes = partition(size, lambda rank, other: reason(rank, other) == "")
    arenas = partition(size, lambda rank, other: other in findings[rank]["arena"] and rank in findings[other]["arena"])
    known = all(offer["cells"] is not None for offer in offers)
    cells = [min(offers[other]["cells"] for other in range(size) if nodes[other] == node) for node in nodes if known]
    reasons: dict[tuple[int, int], tuple[int, int, str]] = {}
    for rank in range(size):
        for other in range(rank + 1, size):
            if nodes[rank] != nodes[other] and (why := reason(rank, other)):
                reasons.setdefault((nodes[rank], nodes[other]), (rank, other, why))
    return Sharing(
        tuple(nodes) if known else None,
        tuple(arenas),
        tuple(offer["sums"] for offer in offers),
        tuple(cells) if known else None,
        tuple(reasons.values()),
    )


def partition(size: int, together: Callable[[int, int], bool]) -> list[int]:
    """Returns, by rank, the number of its group; every two ranks of a group satisfy ``together``."""
    groups: list[list[int]] = []
    numbers = []
    for rank in range(size):
        fitting = (n for n, members in enumerate(groups) if all(together(rank, member) for member in members))
        number = next(fitting, len(groups))
        if number == len(groups):
            groups.append([])
        groups[number].append(rank)
        numbers.append(number)
    return numbers


def read_memory(pid: int, address: int, token: bytes) -> str:
    """Returns why MPICH cannot read another process's memory (CMA), which should hold ``token``; empty if it can.

    Without CMA, MPICH copies large messages through shared memory in pieces of 8 KiB, which takes 20 times as long as
    TCP over the loopback interface. So such processes are treated as not sharing memory.
    """
    if not ptrace_is_free():
        return "reading another process's memory is restricted (kernel.yama.ptrace_scope)"
    buffer = ctypes.create_string_buffer(len(token))
    local = _Vector(ctypes.addressof(buffer), len(token))
    remote = _Vector(address, len(token))
    try:
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return "this system has no process_vm_readv"
    read.restype = ctypes.c_ssize_t
    read.argtypes = [ctypes.c_int, _Pointer, ctypes.c_ulong, _Pointer, ctypes.c_ulong, ctypes.c_ulong]
    got = read(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if got == len(token) and buffer.raw == token:
        return ""
    code = ctypes.get_errno()
    reason = os.strerror(code) if got < 0 else "the memory belongs to another process"
    return f"one cannot read the memory of the other (process_vm_readv: {reason})"


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_Pointer = ctypes.POINTER(_Vector)


def ptrace_is_free() -> bool:
    """Returns whether Yama does not restrict ptrace; MPICH does not use CMA under any restriction."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as scope:
            return scope.read(1) == "0"
    except OSError:
        return True


def _allocate(handle: int, nbytes: int) -> bool:
    """Allocates memory for a file, so that a lack of it is not found by a SIGBUS in MPI; returns whether it fits."""
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            os.ftruncate(handle, _TOKEN_BYTES)
            return False
    return True


def _make_arena() -> Arena | None:
    try:
        return Arena()
    except (AttributeError, OSError):  # memfd_create is missing on this system, or not permitted
        return None


def _processes() -> int:
    """Returns the number of the PID namespace, to explain findings."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as lines:
            return lines.read().strip()
    except OSError:
        return ""
