"""The chief's part of the rendezvous: the listening socket, and the server process that serves it."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence

import msgspec

from tfdist._version import __version__
from tfdist.cluster import hosts
from tfdist.cluster.server import JobDescription
from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import split_address
from tfdist.errors import RendezvousError


def listen(address: str) -> socket.socket:
    """Returns a socket that listens at ``host:port``, or on all interfaces; see `tfdist.cluster.hosts.to_listen_at`.

    Raises:
        RendezvousError: the port is in use or not allowed, or the address cannot be resolved.
    """
    port = split_address(address)[1]
    try:
        family, own = (hosts.to_listen_at(address) or [(hosts.addresses_of(address)[0][0], "")])[0]
    except OSError as error:
        raise RendezvousError(
            f"the chief's own address {address} cannot be resolved ({error}). Check it in TF_CONFIG."
        ) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((own, port))
    except OSError as error:
        listener.close()
        advice = (
            "another process uses it: end that process (`ss -ltnp` shows it) or give the chief another port in "
            "TF_CONFIG, on every task"
            if error.errno == errno.EADDRINUSE
            else error.strerror
        )
        raise RendezvousError(f"the chief cannot listen at {address}: {advice}.") from None
    listener.listen(512)
    return listener


class ServerProcess:
    """The rendezvous server's process, which the chief starts.

    Args:
        listener: socket that the server serves; closed in this process.
        tasks: names of the tasks, by number.
        size: number of tasks with a rank.
        digest: fingerprint of the cluster.
        secret: the job's secret, or empty bytes.
        timeouts: the job's deadlines.
        is_elastic: whether tasks may come again, and new tasks may come, after the start.
    """

    def __init__(
        self,
        listener: socket.socket,
        tasks: Sequence[str],
        size: int,
        digest: str,
        secret: bytes,
        timeouts: Timeouts,
        is_elastic: bool = False,
    ) -> None:
        job = JobDescription(
            name=f"tfdist_{uuid.uuid4().hex}",
            tasks=tuple(tasks),
            size=size,
            is_elastic=is_elastic,
            digest=digest,
            version=__version__,
            secret=secret.decode("utf-8", "surrogateescape"),
            start_timeout=timeouts.start,
            heartbeat_timeout=timeouts.heartbeat,
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TFDIST_SECRET")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tfdist.cluster.server", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            text=True,
        )
        listener.close()
        assert self._process.stdin
        # Stays open, because its end tells the server that the chief has died.
        self._process.stdin.write(msgspec.json.encode(job).decode() + "\n")
        self._process.stdin.flush()

    def close(self, timeout: float = 5.0) -> None:
        """Waits until the server has ended, as it does when all training tasks have left; kills it after a timeout."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def release(self) -> None:
        """Lets the server go on for the remaining tasks; it ends by itself when no training task is left."""
        assert self._process.stdin
        self._process.stdin.close()
