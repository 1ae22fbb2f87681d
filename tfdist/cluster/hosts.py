"""Which processes share a machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path


def host_id() -> str:
    """A name for this machine that no other machine has, nor a container with shared memory or a network of its own."""
    memory = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{socket.gethostname()} {memory} {network_id()}"


def network_id() -> str:
    """A name for the network interfaces that this process sees; processes with one name reach each other on one's
    loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network = 0
    return f"{boot} {network}"


def local_place(hosts: Sequence[str], rank: int) -> tuple[int, int]:
    """The local rank of a process, and how many processes share its machine.

    Args:
        hosts: every rank's `host_id`.
        rank: of the process.
    """
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return neighbours.index(rank), len(neighbours)


def outside_address() -> str:
    """This machine's address on the interface that leads to others.

    A connected UDP socket tells it without sending anything; the machine's own name often means the loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's, as this process sees its network.

    Args:
        address: ``host:port``.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        family, _, _, _, target = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind((target[0], 0))
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an address can only be reached from this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(str(address).startswith("127.") or address == "::1" for address in found)
