"""How MPI comes up among the tasks that have met: from their own sockets, or by a launcher's MPI."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfdist._version import __version__
from tfdist.cluster import hosts, launcher, rendezvous
from tfdist.cluster.control import Control
from tfdist.cluster.pmi import ProcessManager
from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.cluster.spec import Cluster
from tfdist.comm import messages, mpi_library, segments
from tfdist.comm.mpi import MPICommunicator, simulates_hosts
from tfdist.comm.probe import CELLS_VARIABLE, Probe, Sharing, decide, ptrace_is_free
from tfdist.errors import MPIUnavailableError, RendezvousError, TfdistError

log = logging.getLogger("tfdist")


@dataclass
class Started:
    """What has come up, for the world to stand on and to take down again.

    Attributes:
        module: `mpi4py.MPI`.
        communicator: among all ranks.
        control: the connection to the rendezvous server.
        members: what each task says of itself, by rank.
        server: the rendezvous server, on the rank that has started it.
        manager: of this process's part of MPI; None under a launcher.
    """

    module: Any
    communicator: MPICommunicator
    control: Control
    members: list[dict[str, Any]]
    server: rendezvous.ServerProcess | None
    manager: ProcessManager | None


def among_tasks(cluster: Cluster, timeouts: Timeouts) -> Started:
    """Meets the other tasks of a cluster at the chief's address, and brings MPI up among them.

    Args:
        cluster: who takes part, this task among them.
        timeouts: how long to wait for the others.

    Raises:
        TfdistError: the others did not come, or refused this process; no MPI library can be used.
    """
    module = mpi_library.load()  # before anyone is kept waiting
    address = cluster.tasks[0].address
    secret = read_secret()
    server = None
    if cluster.rank == 0:
        if not secret:
            _say_who_can_join(address)
        names = [str(task) for task in cluster.tasks]
        server = rendezvous.ServerProcess(rendezvous.listen(address), names, cluster.digest(), secret, timeouts)
    control = Control(address, _claims(cluster.rank, cluster.digest()), secret, timeouts)
    try:
        members = control.join()
        probe = Probe(control.job, cluster.rank)
        sharing = _find_out_what_is_shared(control, probe, members)
        if cluster.rank == 0:
            _say_what_is_not_shared(sharing)
        settings = mpi_library.network_settings(module, len({member["network"] for member in members}) == 1)
        if sharing.cells is not None:
            settings[CELLS_VARIABLE] = str(sharing.cells[cluster.rank])
        manager = ProcessManager(control, cluster.size, sharing.nodes)
        with _initialization(control, timeouts):
            mpi_library.initialize_from_socket(module, manager.fd, cluster.rank, cluster.size, settings)
            if sharing.nodes and sharing.nodes.count(sharing.nodes[cluster.rank]) == 1:
                segments.unlink_own()  # at once: nobody else may be allowed to, where ranks run as different users
            control.request("barrier", name="initialized")
            communicator = MPICommunicator(module.COMM_WORLD, probe.arena, probe.neighbours, sharing.arenas)
    except BaseException as error:
        if control.failure is not None:
            launcher.tell(launcher.VICTIM)
        else:
            control.leave(f"{type(error).__name__}: {error}"[:1000], {})
        if control.job:
            segments.unlink_of(control.job)
        control.close()
        if server:
            server.close()
        raise
    segments.unlink_own()
    return Started(module, communicator, control, members, server, manager)


def under_launcher(timeouts: Timeouts) -> Started:
    """Joins the MPI that mpiexec or srun has started, and opens a rendezvous on its rank 0.

    Args:
        timeouts: how long to wait for the others.

    Raises:
        TfdistError: as `among_tasks`.
    """
    module = mpi_library.load()
    with _initialization(None, timeouts):
        mpi_library.initialize_from_launcher(module)
    comm = module.COMM_WORLD
    if comm.size == 1:
        raise TfdistError(
            f"the launcher started {launcher.size()} processes, but each sees an MPI world of one: the MPI library "
            f"that was loaded ({mpi_library.library(module)[0]}) is not the launcher's. Use the mpiexec that came with "
            "it, or install mpi4py against the launcher's MPI. `tfdist doctor` shows both."
        )
    one_network = messages.agree(comm, hosts.network_id())
    segments.unlink_own()  # all have attached to them, or they would not have agreed
    server, meeting = None, {}
    if comm.rank == 0:
        try:
            listener = rendezvous.listen("127.0.0.1:0" if one_network else "0.0.0.0:0")
            secret = os.urandom(16).hex()
            host = "127.0.0.1" if one_network else hosts.outside_address()
            meeting = {"address": f"{host}:{listener.getsockname()[1]}", "secret": secret}
            names = [f"rank {rank}" for rank in range(comm.size)]
            server = rendezvous.ServerProcess(listener, names, "launched", secret.encode(), timeouts)
        except (OSError, TfdistError) as error:
            meeting = {"failed": f"rank 0 could not open the rendezvous: {error}"[:1000]}
    meeting = messages.broadcast(comm, meeting)
    if "failed" in meeting:
        raise RendezvousError(meeting["failed"])
    claims = _claims(comm.rank, "launched")
    control = Control(meeting["address"], claims, meeting["secret"].encode(), timeouts)
    members = control.join()
    probe = Probe(control.job, comm.rank, before_mpi=False)
    sharing = _find_out_what_is_shared(control, probe, members)
    communicator = MPICommunicator(comm, probe.arena, probe.neighbours, sharing.arenas)
    _refuse_false_neighbours(module, communicator, sharing)
    return Started(module, communicator, control, members, server, None)


def _claims(rank: int, digest: str) -> dict[str, Any]:
    return {
        "rank": rank,
        "version": __version__,
        "digest": digest,
        "host": hosts.host_id(),
        "network": hosts.network_id(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
    }


def _say_who_can_join(address: str) -> None:
    reach = "every process on this machine" if hosts.is_loopback(address) else "everyone who can reach that address"
    log.warning(
        "tfdist: no job secret is set: %s (%s) can join this job. Set TFDIST_SECRET to the same value on every task.",
        reach,
        address,
    )


def _find_out_what_is_shared(control: Control, probe: Probe, members: list[dict[str, Any]]) -> Sharing:
    """Has every process try what the others offer; see `tfdist.comm.probe`.

    Raises:
        MPIUnavailableError: a process has no room for MPI's shared memory, which MPICH makes in any case.
    """
    try:
        offers = control.all_gather("what each offers", probe.offer())
        if problems := [
            f"rank {rank} on {members[rank]['hostname']}: {offer['problem']}"
            for rank, offer in enumerate(offers)
            if offer["problem"]
        ]:
            raise MPIUnavailableError(
                f"MPI needs shared memory in /dev/shm; {'; '.join(problems[:5])}. Give the container more "
                "(`docker run --shm-size=1g`; in Kubernetes an emptyDir of medium Memory at /dev/shm)."
            )
        findings = control.all_gather("what each found", probe.try_all(offers))
    finally:
        probe.close()
    sharing = decide(offers, findings)
    probe.keep([rank for rank, group in enumerate(sharing.arenas) if group == sharing.arenas[probe.rank]])
    return sharing


def _say_what_is_not_shared(sharing: Sharing) -> None:
    """Logs one line where ranks of one machine use TCP: a warning, unless large transfers go through memory."""
    if simulates_hosts() or not sharing.reasons:
        return
    one, other, why = sharing.reasons[0]
    more = f" (and {len(sharing.reasons) - 1} more such pairs)" if len(sharing.reasons) > 1 else ""
    slow = any(sharing.arenas[one] != sharing.arenas[other] for one, other, _ in sharing.reasons)
    what = "They communicate over TCP, which is slower" if slow else "Their small messages go over TCP"
    log.log(
        logging.WARNING if slow else logging.INFO,
        "tfdist: MPI shares no memory between rank %d and rank %d%s, though they run on one machine: %s. %s.",
        *(one, other, more, why, what),
    )


def _refuse_false_neighbours(module: Any, communicator: MPICommunicator, sharing: Sharing) -> None:
    """Fails where a launcher's MPICH would read the memory of a process that it cannot read, or of a stranger."""
    enabled = os.environ.get("MPIR_CVAR_CH4_CMA_ENABLE", "1") != "0" and ptrace_is_free()
    if not enabled or not mpi_library.library(module)[0].startswith("MPICH"):
        return
    for one, other, why in sharing.reasons:
        if communicator.nodes[one] == communicator.nodes[other]:
            raise MPIUnavailableError(
                f"MPICH takes rank {one} and rank {other} for neighbours that read each other's memory, but {why}. "
                "Set MPIR_CVAR_CH4_CMA_ENABLE=0 on all ranks, or start the script from TF_CONFIG, which finds this out."
            )


@contextlib.contextmanager
def _initialization(control: Control | None, timeouts: Timeouts) -> Iterator[None]:
    """Bounds the time in which MPI starts, which waits for a lost or deaf peer forever and cannot be interrupted."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(timeouts.start):
            error = MPIUnavailableError(
                f"it did not end within {timeouts.start:g} s. Ranks that MPI takes for neighbours share no memory, or "
                "ranks cannot reach each other on the ports that MPI chose. `tfdist doctor` tells more; if only time "
                "was short, raise TFDIST_START_TIMEOUT."
            )
            if control:
                control.tell_failure(error)
            _die_in_initialization(control, error)

    def failed(error: TfdistError) -> None:
        launcher.tell(launcher.VICTIM)
        _die_in_initialization(control, error)

    threading.Thread(target=watch, name="tfdist-initialization", daemon=True).start()
    if control:
        control.when_failed(failed)
    try:
        yield
    finally:
        done.set()
        if control:
            control.when_failed(None)


def _die_in_initialization(control: Control | None, error: TfdistError) -> None:
    """Ends the process from outside `MPI_Init`."""
    if control:
        segments.unlink_of(control.job)
    print(f"tfdist: lost during MPI's initialization: {error}", file=sys.stderr, flush=True)
    os._exit(1)
