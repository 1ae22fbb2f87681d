"""Finds out which processes share a machine, and which addresses are on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path


def host_id() -> str:
    """Returns a name unique to this machine, or to this container if it has its own shared memory or network."""
    memory = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{socket.gethostname()} {memory} {network_id()}"


def network_id() -> str:
    """Returns a name for the network interfaces that this process sees.

    Processes with the same name reach each other over the loopback interface.
    """
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
    """Returns the local rank of a process, and the number of processes on its machine.

    Args:
        hosts: `host_id` of every rank.
        rank: rank of the process.
    """
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return neighbours.index(rank), len(neighbours)


def outside_address() -> str:
    """Returns this machine's address on the interface that leads to other machines.

    A connected UDP socket knows this address without sending anything. The machine's own name often resolves to the
    loopback address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation; nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def is_here(address: str) -> bool:
    """Returns whether an address belongs to this machine, or to the network that this process sees in a container.

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
    """Returns whether an address ``host:port`` can only be reached from this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(str(address).startswith("127.") or address == "::1" for address in addresses)
