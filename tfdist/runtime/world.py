"""A process's place among the processes that train together.

With TF_CONFIG (or a resolver), tasks enter a job at the chief's address, and training tasks start MPI themselves. Under
mpiexec, MPI starts first, and the address of the rendezvous is broadcast over it. Without a cluster a process trains
alone.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from tfdist.cluster import hosts, launcher
from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import Cluster
from tfdist.collectives.clock import clock_offset
from tfdist.comm.local import LocalWorld
from tfdist.engine import timeline
from tfdist.engine.engine import Engine
from tfdist.engine.group import ProcessGroup
from tfdist.errors import ClusterSpecError
from tfdist.notices import notice
from tfdist.runtime import job, start
from tfdist.runtime.membership import Membership

_SWITCH_SECONDS = 1e-4
"""Seconds for which a busy Python thread (a data pipeline, a callback) may keep the GIL from a waiting collective.
Python's default is 5 ms, which each step would wait several times."""


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from one process of the job.

    Attributes:
        engine: the engine that runs this process's collectives.
        rank: this process's rank, from 0; -1 for a parameter server or an evaluator.
        size: number of processes that train together.
        local_rank: this process's rank among the processes on its machine.
        local_size: number of processes on this machine.
        role: this process's job: ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``.
    """

    engine: Engine
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    role: str = "chief"

    @property
    def group(self) -> ProcessGroup:
        """Group of all processes that train together.

        Raises:
            ClusterSpecError: this process is not one of them.
        """
        if self.rank < 0:
            raise ClusterSpecError(
                f"this task is of the job {self.role!r}: it has no rank and takes no part in collectives. Call them in "
                "training tasks only: `if tfdist.rank() >= 0:`."
            )
        return ProcessGroup(self.engine)

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Returns every process's value, by rank. Uses the rendezvous, so that no collective is needed.

        Args:
            name: name of this exchange, used only once.
            value: this process's value, which JSON can hold.
        """
        control = self.engine.control
        return [value] if control is None else control.gather(name, value, range(self.size))


_world: World | None = None
_alone: World | None = None
_lock = threading.Lock()


def enter(cluster: Cluster | None, timeouts: Timeouts) -> World:
    """Enters the job, once per process; later calls return the same world. A single process enters no job.

    Args:
        cluster: the job's tasks; None to learn them from a launcher, or to train alone.
        timeouts: the deadlines for waits for other tasks, at the start and later.

    Raises:
        TfdistError: the other tasks did not come, or refused this process, or no MPI library can be used.
    """
    global _world
    if launcher.size() == 1 if cluster is None else cluster.size == 0 or cluster.tasks == (cluster.task,):
        return alone()
    with _lock:
        member = job.enter(cluster, timeouts)
        if _world is None:
            _world = _world_of(member, timeouts)
        return _world


def train(cluster: Cluster | None, timeouts: Timeouts) -> World:
    """Enters the job to train with collectives. An evaluator, and a chief without other training tasks, train alone.

    Args:
        cluster: the job's tasks; None to learn them from a launcher, or to train alone.
        timeouts: the deadlines for waits for other tasks, at the start and later.

    Raises:
        TfdistError: the job cannot be entered (see `enter`), or this task does not train.
    """
    if cluster is None:
        return enter(cluster, timeouts)
    if cluster.rank is None and cluster.task.job != "evaluator":
        raise ClusterSpecError(
            f"this strategy trains on the chief and the workers of a cluster; this process is {cluster.task}, "
            f"{'a parameter server' if cluster.task.job == 'ps' else 'which the cluster does not list'}. Start the "
            "script without this task."
        )
    is_alone = cluster.rank is None or (cluster.size == 1 and not cluster.is_elastic)
    return alone() if is_alone else enter(cluster, timeouts)


def current() -> World:
    """Returns the world that this process has entered, or else the world of this process alone."""
    return _world or alone()


def alone() -> World:
    """Returns the world of this process alone, whatever job it has entered."""
    global _alone
    with _lock:
        if _alone is None:
            _alone = World(_engine_alone())
        return _alone


def _engine_alone() -> Engine:
    return Engine(LocalWorld(1).communicator(0), None, Timeouts.from_environment())


def _world_of(member: Membership, timeouts: Timeouts) -> World:
    """Returns the world of a member; starts MPI if this task trains with others."""
    cluster = member.cluster
    if cluster is not None and cluster.rank is None:
        return World(_engine_alone(), -1, cluster.size, role=cluster.task.job)
    if cluster is not None and cluster.size == 1:
        return World(_engine_alone())
    if member.started is None:
        start.among_tasks(member, timeouts)
    assert member.started is not None
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    communicator = member.started.communicator
    rank, size = communicator.rank, communicator.size
    engine = member.engine = Engine(communicator, member.control, timeouts, communicator.tags)
    machines = [claims.host for claims in member.started.members]
    if timeline.VARIABLE in os.environ:
        engine.timeline = timeline.EventRecorder(rank, engine.run("the clocks", clock_offset()))
    if rank == 0:
        count = len(set(machines))
        notice("tfdist: training on %d processes on %d host%s.", size, count, "s" if count > 1 else "")
    return World(engine, rank, size, *hosts.local_place(machines, rank), "worker" if rank else "chief")
