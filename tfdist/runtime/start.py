"""Starts MPI among the training tasks of a job: over their own sockets, or with a launcher's MPI."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from tfdist import notices
from tfdist.cluster import hosts, launcher, rendezvous
from tfdist.cluster.control import Control
from tfdist.cluster.messages import Claims
from tfdist.cluster.pmi import ProcessManager
from tfdist.cluster.settings import Timeouts
from tfdist.comm import messages, mpi_library, segments
from tfdist.comm.mpi import MPICommunicator, simulates_hosts
from tfdist.comm.probe import CELLS_VARIABLE, Probe, Sharing, decide, ptrace_is_free
from tfdist.engine import machine_code
from tfdist.errors import MPIUnavailableError, RendezvousError, TfdistError
from tfdist.runtime import membership
from tfdist.runtime.membership import Membership, StartedMPI

log = logging.getLogger("tfdist")


def among_tasks(member: Membership, timeouts: Timeouts) -> None:
    """Starts MPI among the training tasks of a cluster. Each of them calls this once.

    All training tasks start MPI together, because MPI's processes are fixed from then on and any of them may be in a
    group that is made later.

    Args:
        member: this task's membership.
        timeouts: the deadlines for waits for other tasks.

    Raises:
        TfdistError: the other tasks did not come, or no MPI library can be used. The process has then left the job.
    """
    cluster, control = member.cluster, member.control
    assert cluster is not None
    assert cluster.rank is not None
    rank, size = cluster.rank, cluster.size
    try:
        module = mpi_library.load()  # may fail, so comes before the other tasks wait for this one
        members = _bind(control, size)
        probe = Probe(control.job, rank, sums=machine_code.is_usable())
        sharing = _probe_shared_memory(control, probe, members)
        if rank == 0:
            _say_what_is_not_shared(sharing)
        settings = mpi_library.network_settings(module, len({member.network for member in members}) == 1)
        if sharing.cells is not None:
            settings[CELLS_VARIABLE] = str(sharing.cells[rank])
        manager = ProcessManager(control, size, sharing.nodes)
        with _initialization(control, timeouts):
            mpi_library.initialize_from_socket(module, manager.fd, rank, size, settings)
            if sharing.nodes and sharing.nodes.count(sharing.nodes[rank]) == 1:
                segments.unlink_own()  # at once, because other ranks may run as other users, who are not allowed to
            control.barrier("initialized", range(size))
            communicator = MPICommunicator(
                module.COMM_WORLD, probe.arena, probe.neighbours, sharing.arenas, sharing.sums
            )
    except BaseException as error:
        member.abandon(error)
        raise
    segments.unlink_own()
    member.started = StartedMPI(module, communicator, members, manager)


def under_launcher(timeouts: Timeouts) -> Membership:
    """Initializes the MPI that mpiexec or srun has started, and opens a rendezvous on its rank 0.

    Args:
        timeouts: the deadlines for waits for other tasks.

    Raises:
        TfdistError: the other tasks did not come, or no MPI library can be used.
    """
    module = mpi_library.load()
    with _initialization(None, timeouts):
        mpi_library.initialize_from_launcher(module)
    comm = module.COMM_WORLD
    if comm.size == 1:
        raise TfdistError(
            f"the launcher started {launcher.size()} processes, but each sees an MPI world of one: the MPI library "
            f"that was loaded ({mpi_library.library(module)[0]}) is not the launcher's. Use the mpiexec of that "
            "library, or install mpi4py against the launcher's MPI. `tfdist doctor` shows both."
        )
    one_network = messages.agree(comm, hosts.network_id())
    segments.unlink_own()  # all ranks have attached to the segments, or they could not have agreed
    server, meeting = None, {}
    if comm.rank == 0:
        try:
            listener = rendezvous.listen("127.0.0.1:0" if one_network else "0.0.0.0:0")
            secret = os.urandom(16).hex()
            host = "127.0.0.1" if one_network else hosts.outside_address()
            meeting = {"address": f"{host}:{listener.getsockname()[1]}", "secret": secret}
            names = [f"rank {rank}" for rank in range(comm.size)]
            server = rendezvous.ServerProcess(listener, names, comm.size, "launched", secret.encode(), timeouts)
        except (OSError, TfdistError) as error:
            meeting = {"failed": f"rank 0 could not start the rendezvous server: {error}"[:1000]}
    meeting = messages.broadcast(comm, meeting)
    if "failed" in meeting:
        raise RendezvousError(meeting["failed"])
    claims = membership.claims(comm.rank, f"rank {comm.rank}", "launched")
    control = Control(meeting["address"], claims, meeting["secret"].encode(), timeouts)
    control.enter()
    members = _bind(control, comm.size)
    probe = Probe(control.job, comm.rank, before_mpi=False, sums=machine_code.is_usable())
    sharing = _probe_shared_memory(control, probe, members)
    communicator = _communicator(comm, probe, sharing)
    _refuse_false_neighbours(module, communicator, sharing)
    launched = Membership(None, control, server)
    launched.started = StartedMPI(module, communicator, members, None)
    return launched


def _bind(control: Control, size: int) -> list[Claims]:
    claims = msgspec.to_builtins(control.claims)
    return [msgspec.convert(other, Claims) for other in control.bind(claims, size)]


def _probe_shared_memory(control: Control, probe: Probe, members: list[Claims]) -> Sharing:
    """Has every process try which memory it can share with the others; see `tfdist.comm.probe`.

    Raises:
        MPIUnavailableError: a process has no room for MPI's shared memory, which MPICH always creates.
    """
    try:
        offers = control.gather("what each offers", probe.offer(), range(len(members)))
        if problems := [
            f"rank {rank} on {members[rank].hostname}: {offer['problem']}"
            for rank, offer in enumerate(offers)
            if offer["problem"]
        ]:
            raise MPIUnavailableError(
                f"MPI needs shared memory in /dev/shm; {'; '.join(problems[:5])}. Give the container more "
                "(`docker run --shm-size=1g`; in Kubernetes an emptyDir of medium Memory at /dev/shm)."
            )
        findings = control.gather("what each found", probe.try_all(offers), range(len(members)))
    finally:
        probe.close()
    sharing = decide(offers, findings)
    probe.keep([rank for rank, group in enumerate(sharing.arenas) if group == sharing.arenas[probe.rank]])
    return sharing


def _communicator(comm: Any, probe: Probe, sharing: Sharing) -> MPICommunicator:
    return MPICommunicator(comm, probe.arena, probe.neighbours, sharing.arenas, sharing.sums)


def _say_what_is_not_shared(sharing: Sharing) -> None:
    """Logs a line if ranks of one machine use TCP; a warning, unless their large transfers use shared memory."""
    if simulates_hosts() or not sharing.reasons:
        return
    rank, other, why = sharing.reasons[0]
    more = f" (and {len(sharing.reasons) - 1} more such pairs)" if len(sharing.reasons) > 1 else ""
    slow = any(sharing.arenas[rank] != sharing.arenas[other] for rank, other, _ in sharing.reasons)
    what = "They communicate over TCP, which is slower" if slow else "Their small messages go over TCP"
    log.log(
        logging.WARNING if slow else logging.INFO,
        "tfdist: MPI shares no memory between rank %d and rank %d%s, though they run on one machine: %s. %s.",
        rank,
        other,
        more,
        why,
        what,
    )


def _refuse_false_neighbours(module: Any, communicator: MPICommunicator, sharing: Sharing) -> None:
    """Raises an error if a launcher's MPICH would read memory that it cannot read, or a wrong process's memory."""
    enabled = os.environ.get("MPIR_CVAR_CH4_CMA_ENABLE", "1") != "0" and ptrace_is_free()
    if not enabled or not mpi_library.library(module)[0].startswith("MPICH"):
        return
    for rank, other, why in sharing.reasons:
        if communicator.nodes[rank] == communicator.nodes[other]:
            raise MPIUnavailableError(
                f"MPICH assumes that rank {rank} and rank {other} can read each other's memory, but {why}. Set "
                "MPIR_CVAR_CH4_CMA_ENABLE=0 on all ranks, or start the script with TF_CONFIG instead of a launcher."
            )


@contextlib.contextmanager
def _initialization(control: Control | None, timeouts: Timeouts) -> Iterator[None]:
    """Limits the time in which MPI starts, as MPI would wait forever for a lost peer, and cannot be interrupted."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(timeouts.start):
            error = MPIUnavailableError(
                f"MPI did not start within {timeouts.start:g} s. Ranks that MPI takes for neighbours share no memory, "
                "or ranks cannot reach each other on the ports that MPI chose. Run `tfdist doctor` to find out; if "
                "only time was short, raise TFDIST_START_TIMEOUT."
            )
            if control:
                control.tell_failure(error)
            _die_in_initialization(control, error)

    def failed(error: TfdistError) -> None:
        launcher.report_to_launcher(launcher.VICTIM)
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
    notices.say(f"tfdist: MPI's initialization failed: {error}")
    os._exit(1)
