"""Where a server listens."""

from __future__ import annotations

import errno
import socket

import zmq

from tfdist.errors import TfdistError


def bind(bound: zmq.Socket[bytes], address: str, whose: str = "the parameter server") -> str:
    """Has a socket listen at an address, or, where that is not this machine's own, at all of the machine's.

    Args:
        bound: the socket.
        address: ``host:port``; port 0 takes a free one.
        whose: address it is, for messages.

    Returns:
        The address by which others reach it.

    Raises:
        TfdistError: the host cannot be resolved, or the port is in use or not allowed.
    """
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter of a name that no name can be
        raise TfdistError(f"{whose}'s own address {address} cannot be resolved ({error})") from None
    numeric = f"[{target[0]}]" if family == socket.AF_INET6 else target[0]
    bound.setsockopt(zmq.IPV6, int(family == socket.AF_INET6))
    try:
        try:
            bound.bind(f"tcp://{numeric}:{port}")
        except zmq.ZMQError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
            bound.bind(f"tcp://*:{port}")
    except zmq.ZMQError as error:
        raise TfdistError(
            f"{whose} cannot listen at {address}: {error.strerror}. If another process uses the port, end that one "
            "(`ss -ltnp` shows it) or give it another port, on every task."
        ) from None
    endpoint = bytes(bound.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
    return f"{host}:{endpoint.rpartition(':')[2]}"
