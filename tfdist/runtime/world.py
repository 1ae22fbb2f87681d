"""A process's place among the processes that train together, and how it gets there.

There are three ways in. From TF_CONFIG (or a resolver), tasks meet at the chief's address and bring MPI up
themselves. Under mpiexec, MPI comes first, and the meeting place is made known over it. And a process that nobody
told anything is a world of one.
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
from tfdist.engine.group import Group
from tfdist.errors import ClusterSpecError
from tfdist.notices import notice
from tfdist.runtime import leave, start
from tfdist.runtime.start import Started

_SWITCH_SECONDS = 1e-4
"""How long a busy Python thread (a data pipeline, a callback) may keep the GIL from a collective that wants it. By
default it is 5 ms, for which each step would wait several times."""


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from one of them.

    Attributes:
        engine: runs their collectives.
        local_rank: this process's rank among those on its machine.
        local_size: how many those are.
    """

    engine: Engine
    local_rank: int = 0
    local_size: int = 1

    @property
    def group(self) -> Group:
        """All processes."""
        return Group(self.engine)

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Every process's value, by rank; over the rendezvous, as no collective is needed yet.

        Args:
            name: of this exchange, used once.
            value: for JSON.
        """
        control = self.engine.control
        return [value] if control is None else control.all_gather(name, value)

    @property
    def rank(self) -> int:
        """This process's, from 0."""
        return self.engine.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.engine.size


_world: World | None = None
_alone: World | None = None
_cluster: Cluster | None = None
_lock = threading.Lock()


def join(cluster: Cluster | None, timeouts: Timeouts) -> World:
    """Joins the world, once per process; later calls return the same one. A world of one is nothing to join.

    Args:
        cluster: who takes part; None to learn it from a launcher, or to be alone.
        timeouts: how long to wait for the others, at the start and later.

    Raises:
        TfdistError: the others did not come, or refused this process; no MPI library can be used.
    """
    global _world, _cluster
    if launcher.size() == 1 if cluster is None else cluster.outside or cluster.size == 1:
        return _world_of_one()
    with _lock:
        if _world is not None and _cluster != cluster:
            raise ClusterSpecError(
                f"this process has joined a job already ({_cluster or 'of an MPI launcher'}), and joins one in its "
                f"life; got {cluster}."
            )
        if _world is None:
            begun = start.under_launcher(timeouts) if cluster is None else start.among_tasks(cluster, timeouts)
            _world = _world_of(begun, timeouts)
            _cluster = cluster
        return _world


def current() -> World:
    """The world that this process has joined; a world of one before."""
    return _world or _world_of_one()


def _world_of_one() -> World:
    global _alone
    with _lock:
        if _alone is None:
            _alone = World(Engine(LocalWorld(1).communicator(0), None, Timeouts.from_environment()))
        return _alone


def _world_of(begun: Started, timeouts: Timeouts) -> World:
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    communicator = begun.communicator
    engine = Engine(communicator, begun.control, timeouts, communicator.tags)
    machines = [member["host"] for member in begun.members]
    local_rank, local_size = hosts.local_place(machines, communicator.rank)
    if timeline.VARIABLE in os.environ:
        engine.timeline = timeline.Timeline(engine.rank, engine.run("the clocks", clock_offset()))
    if communicator.rank == 0:
        count = len(set(machines))
        notice("tfdist: %d processes on %d host%s have joined.", communicator.size, count, "s" if count > 1 else "")
    leave.arrange(begun, engine)
    return World(engine, local_rank, local_size)
