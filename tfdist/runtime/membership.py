"""A process's membership in its job, with or without MPI."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from tfdist._version import __version__
from tfdist.cluster import hosts, launcher, rendezvous
from tfdist.cluster.control import Control
from tfdist.cluster.messages import Claims
from tfdist.cluster.pmi import ProcessManager
from tfdist.cluster.rendezvous import ServerProcess
from tfdist.cluster.settings import LEAST_SECRET_BYTES, Timeouts, read_secret
from tfdist.cluster.spec import Cluster
from tfdist.comm import segments
from tfdist.comm.mpi import MPICommunicator
from tfdist.engine.engine import Engine
from tfdist.errors import RendezvousError

log = logging.getLogger("tfdist")

LEAVE_SECONDS = 5.0
"""Seconds for the rendezvous server to learn that this process leaves."""


@dataclass
class StartedMPI:
    """The MPI that has been started for a job.

    Attributes:
        module: the module `mpi4py.MPI`.
        communicator: communicator of all ranks.
        members: each rank's statement about itself, by rank.
        manager: the process manager of this process's MPI library; None under a launcher.
    """

    module: Any
    communicator: MPICommunicator
    members: list[Claims]
    manager: ProcessManager | None


class Membership:
    """A process's membership in its job.

    Args:
        cluster: the job's tasks; None under an MPI launcher.
        control: the connection to the rendezvous server.
        server: the rendezvous server, if this process has started it.

    Attributes:
        started: MPI, once it has started; None before.
        engine: the engine that runs the collectives over MPI; None without MPI.
        is_closed: whether the process has left the job.
    """

    def __init__(self, cluster: Cluster | None, control: Control, server: ServerProcess | None) -> None:
        self.cluster = cluster
        self.control = control
        self.server = server
        self.started: StartedMPI | None = None
        self.engine: Engine | None = None
        self.is_closed = False

    def leave(self, reason: str | None) -> None:
        """Leaves a job in which this process has not started MPI.

        Args:
            reason: the error that the script ended with; None without an error.
        """
        self.control.leave(reason, {}, LEAVE_SECONDS)
        self.close()

    def close(self) -> None:
        """Closes the connection. The rendezvous server goes on as long as other tasks are there."""
        self.is_closed = True
        waits = any(task != self.control.task for task in self.control.present)
        self.control.close()
        if self.server:
            self.server.release() if waits else self.server.close()

    def abandon(self, error: BaseException) -> None:
        """Leaves a job in which MPI could not be started.

        Args:
            error: the reason.
        """
        if self.control.failure is not None:
            launcher.report_to_launcher(launcher.VICTIM)
        else:
            self.control.leave(f"{type(error).__name__}: {error}"[:1000], {}, LEAVE_SECONDS)
        if self.control.job:
            segments.unlink_of(self.control.job)
        self.close()


def of_task(cluster: Cluster, timeouts: Timeouts) -> Membership:
    """Enters the job of a cluster, without MPI.

    Args:
        cluster: the tasks and this process's own task.
        timeouts: the deadlines for waits for other tasks.

    Raises:
        RendezvousError: the chief cannot be reached, or refused this process.
    """
    address = cluster.tasks[0].address
    secret = read_secret()
    server, unserved = None, None
    if cluster.number == 0:
        try:
            server = _serve(cluster, address, secret, timeouts)
        except RendezvousError as error:
            if not cluster.is_elastic:
                raise
            unserved = error  # the job's server may have outlived the chief that started it
    name = f"{cluster.task.job} {cluster.task.index}"
    control = Control(address, claims(cluster.number, name, cluster.digest()), secret, timeouts)
    membership = Membership(cluster, control, server)
    try:
        control.enter()
    except BaseException as error:
        membership.close()
        if unserved is not None and isinstance(error, RendezvousError):
            raise RendezvousError(f"{unserved} No server of this job answers there, either: {error}") from None
        raise
    launcher.report_to_launcher(launcher.ENTERED)
    return membership


def _serve(cluster: Cluster, address: str, secret: bytes, timeouts: Timeouts) -> ServerProcess:
    """Starts the rendezvous server."""
    listener = rendezvous.listen(address)
    if not secret:
        say_who_can(address, "enter this job")
    elif len(secret) < LEAST_SECRET_BYTES:
        log.warning(
            "tfdist: the job's secret has %d characters, so few that it can be guessed from recorded network traffic. "
            'Make a secret of %d or more: python -c "import secrets; print(secrets.token_hex(16))".',
            len(secret),
            LEAST_SECRET_BYTES,
        )
    names = [str(task) for task in cluster.tasks]
    return ServerProcess(listener, names, cluster.size, cluster.digest(), secret, timeouts, cluster.is_elastic)


def claims(task: int | None, name: str, digest: str) -> Claims:
    """Returns this process's statement about itself."""
    return Claims(
        task, name, __version__, digest, hosts.host_id(), hosts.network_id(), socket.gethostname(), os.getpid()
    )


def say_who_can(address: str, do: str) -> None:
    """Warns that the job has no secret.

    Args:
        address: address that this process listens at.
        do: what those who reach it can do.
    """
    reach = "every process on this machine" if hosts.is_loopback(address) else "everyone who can reach that address"
    log.warning(
        "tfdist: no job secret is set: %s (%s) can %s. Set TFDIST_SECRET to the same value on every task.",
        reach,
        address,
        do,
    )
