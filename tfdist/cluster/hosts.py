"""Finds out which processes share a machine, and which addresses are on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

_LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback", "localhost4", "localhost6")


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


def addresses_of(address: str) -> list[tuple[int, str]]:
    """Returns the family and the number of each address that a host has, the one to be preferred first.

    Args:
        address: ``host:port``; the host is a name or a number.

    Raises:
        OSError: the host cannot be resolved.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # not a valid name
        raise OSError(str(error)) from None
    return list(dict.fromkeys((int(family), str(target[0])) for family, _, _, _, target in entries))


def to_listen_at(address: str) -> list[tuple[int, str]]:
    """Returns the addresses, as of `addresses_of`, by which others reach this machine's process at ``host:port``.

    There are none, which stands for all of the machine's interfaces, if no interface has the address, as behind a
    service or a NAT, and if only this machine takes its own name for a loopback address, as Debian does (127.0.1.1).

    Raises:
        OSError: the host cannot be resolved.
    """
    found = [own for own in addresses_of(address) if _is_own(*own)]
    is_reached = is_loopback(address) or not any(_is_loopback(number) for _, number in found)
    return found if is_reached else []


def is_here(address: str) -> bool:
    """Returns whether an address belongs to this machine, or to the network that this process sees in a container.

    Args:
        address: ``host:port``.
    """
    try:
        return _is_own(*addresses_of(address)[0])
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Returns whether an address ``host:port`` can only be reached from this machine, also by its name."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        numbers = {number for _, number in addresses_of(address)}
    except OSError:
        return False
    is_number = ":" in host or host.replace(".", "").isdigit()
    is_same_everywhere = is_number or host.lower().partition(".")[0] in _LOCAL_NAMES
    return is_same_everywhere and all(map(_is_loopback, numbers))


def _is_loopback(number: str) -> bool:
    return number.startswith("127.") or number == "::1"


def _is_own(family: int, number: str) -> bool:
    """Returns whether an interface that this process sees has an address."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind((number, 0))
    except OSError:
        return False
    return True
