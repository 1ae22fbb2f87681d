"""A process's place among the processes that train together, and how it gets there.

There are three ways in. From TF_CONFIG (or a resolver), tasks meet at the chief's address and bring MPI up
themselves. Under mpiexec, MPI comes first, and the meeting place is made known over it. And a process that nobody
told anything is a world of one.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tfdist._version import __version__
from tfdist.cluster import hosts, launcher, rendezvous
from tfdist.cluster.control import Control
from tfdist.cluster.pmi import ProcessManager
from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.cluster.spec import Cluster
from tfdist.collectives.clock import clock_offset
from tfdist.comm import messages, mpi_library, segments
from tfdist.comm.mpi import MPICommunicator, simulates_hosts
from tfdist.comm.probe import CELLS_VARIABLE, Probe, Sharing, decide, ptrace_is_free
from tfdist.engine import timeline
from tfdist.engine.engine import Engine
from tfdist.errors import (
    ClusterSpecError,
    MismatchError,
    MPIUnavailableError,
    PeerLostError,
    RendezvousError,
    TfdistError,
)
from tfdist.notices import notice

log = logging.getLogger("tfdist")

_FAREWELL_POLL_SECONDS = 0.05
_FINALIZE_SECONDS = 10.0
_END_SECONDS = 2 * _FINALIZE_SECONDS
_SWITCH_SECONDS = 1e-4
"""How long a busy Python thread (a data pipeline, a callback) may keep the GIL from a collective that wants it. By
default it is 5 ms, for which each step would wait several times."""


@dataclass
class World:
    """The processes that train together, seen from one of them.

    Attributes:
        rank: this process's, from 0.
        size: number of processes.
        local_rank: this process's among those on its machine.
        local_size: how many those are.
        engine: runs their collectives; None in a world of one.
        control: the connection to the rendezvous server; None in a world of one.
        pid: of the process that joined; a forked child is no part of the world.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    engine: Engine | None = None
    control: Control | None = None
    pid: int = field(default_factory=os.getpid)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0


_world: World | None = None
_members: Cluster | None = None
_lock = threading.Lock()


def join(cluster: Cluster | None, timeouts: Timeouts) -> World:
    """Joins the world, once per process; later calls return the same one. A world of one is nothing to join.

    Args:
        cluster: who takes part; None to learn it from a launcher, or to be alone.
        timeouts: how long to wait for the others, at the start and later.

    Raises:
        TfdistError: the others did not come, or refused this process; MPI is not to be had.
    """
    global _world, _members
    alone = launcher.size() == 1 if cluster is None else cluster.outside or cluster.size == 1
    if alone:
        return World()
    with _lock:
        if _world is not None and _members != cluster:
            raise ClusterSpecError(
                f"this process has joined a job already ({_members or 'of an MPI launcher'}), and joins one in its "
                f"life; got {cluster}."
            )
        if _world is None:
            _world = _join_launched(timeouts) if cluster is None else _join_cluster(cluster, timeouts)
            _members = cluster
        return _world


def current() -> World:
    """The world that this process has joined; a world of one before."""
    return _world or World()


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


def _join_cluster(cluster: Cluster, timeouts: Timeouts) -> World:
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
    return _world_of(module, communicator, control, members, timeouts, server, manager)


def _join_launched(timeouts: Timeouts) -> World:
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
    return _world_of(module, communicator, control, members, timeouts, server, None)


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
    """One line, where ranks of one machine talk over TCP: a warning, unless large transfers go through memory."""
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


def _world_of(
    module: Any,
    communicator: MPICommunicator,
    control: Control,
    members: list[dict[str, Any]],
    timeouts: Timeouts,
    server: rendezvous.ServerProcess | None,
    manager: ProcessManager | None,
) -> World:
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    engine = Engine(communicator, control, timeouts, communicator.tags)
    local_rank, local_size = hosts.local_place([member["host"] for member in members], communicator.rank)
    if timeline.VARIABLE in os.environ:
        engine.timeline = timeline.Timeline(communicator.rank, engine.run("the clocks", clock_offset()))
    if communicator.rank == 0:
        count = len({member["host"] for member in members})
        notice("tfdist: %d processes on %d host%s have joined.", communicator.size, count, "s" if count > 1 else "")
    world = World(communicator.rank, communicator.size, local_rank, local_size, engine, control)
    atexit.register(_leave, world, module, server, manager, _Watchdog())
    os.register_at_fork(after_in_child=control.after_fork)
    sys.excepthook = _telling_others(control, sys.excepthook)
    return world


def _telling_others(control: Control, original: Callable[..., Any]) -> Callable[..., Any]:
    """Says why this task ends as soon as it is known: the end itself may wait for threads of the user's."""

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if control.failure is not None:
            launcher.tell(launcher.VICTIM)
        elif not isinstance(error, TfdistError):  # those have been told already
            control.fails_first = True
            control.tell_failure(error)
            launcher.tell(launcher.CAUSE)
        original(kind, error, traceback)

    return hook


def _say_who_can_join(address: str) -> None:
    reach = "every process on this machine" if hosts.is_loopback(address) else "everyone who can reach that address"
    log.warning(
        "tfdist: no job secret is set: %s (%s) can join this job. Set TFDIST_SECRET to the same value on every task.",
        reach,
        address,
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


class _Watchdog:
    """Ends the process if `MPI_Finalize` does not; a thread made in time, as none can be at the end."""

    def __init__(self) -> None:
        self.begin, self.done = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="tfdist-watchdog", daemon=True).start()

    def _watch(self) -> None:
        self.begin.wait()
        if not self.done.wait(_FINALIZE_SECONDS):
            _die_at_the_end(f"MPI_Finalize did not end within {_FINALIZE_SECONDS:g} s")


def _leave(
    world: World,
    module: Any,
    server: rendezvous.ServerProcess | None,
    manager: ProcessManager | None,
    watchdog: _Watchdog,
) -> None:
    """At the end of the process: says farewell, lets the others finish with it, and takes MPI down."""
    control, engine = world.control, world.engine
    assert control is not None
    assert engine is not None
    if os.getpid() != world.pid:
        return  # a forked child; the job is its parent's
    _write_timeline(engine)
    error = getattr(sys, "last_value", None)
    reason = f"{type(error).__name__}: {error}" if error is not None else None
    known = engine.failure is not None or error is not None  # the script has seen it, and ends as it chose to
    failed = known or control.failure is not None
    if (control.failure is not None or engine.failure is not None) and not control.fails_first:
        launcher.tell(launcher.VICTIM)
    control.leave(reason[:1000] if reason else None, engine.counts())
    if not failed:
        failed = not _await_others(world)
    engine.close()
    if not failed:
        control.when_failed(_die_of_others)
        watchdog.begin.set()
        mpi_library.finalize(module)
        watchdog.done.set()
        control.when_failed(None)
        control.end(_END_SECONDS)
    if manager:
        manager.release()
    control.close()
    if server:
        server.close()
    if not known and isinstance(control.failure, (PeerLostError, MismatchError)):
        _end_after_failure(control)


def _end_after_failure(control: Control) -> None:
    """Says what the script, which has ended, could not see. Its own exit code stays, unless a process has died."""
    if not control.peer_died:
        _say_at_the_end(str(control.failure))
        return
    atexit.unregister(_leave)
    atexit._run_exitfuncs()  # those of other libraries; nothing but this changes the exit code now
    _die_at_the_end(str(control.failure))


def _die_of_others(error: TfdistError) -> None:
    launcher.tell(launcher.VICTIM)
    _die_at_the_end(str(error))


def _die_at_the_end(why: str) -> None:
    _say_at_the_end(why)
    sys.stdout.flush()
    os._exit(1)


def _say_at_the_end(why: str) -> None:
    print(f"tfdist: the job failed after this rank's script had ended: {why}", file=sys.stderr, flush=True)


def _write_timeline(engine: Engine) -> None:
    path = os.environ.get(timeline.VARIABLE)
    if path and engine.timeline:
        try:
            engine.timeline.write_part(path)
        except OSError as error:
            log.warning("tfdist: rank %d cannot write its timeline: %s", engine.rank, error)


def _await_others(world: World) -> bool:
    """Waits until every other task has said farewell too, driving what is still under way; False if one is lost."""
    control, engine = world.control, world.engine
    assert control is not None
    assert engine is not None
    while len(control.departed) < world.size:
        if control.failure:
            return False
        engine.communicator.progress()
        time.sleep(_FAREWELL_POLL_SECONDS)
    return control.failure is None
