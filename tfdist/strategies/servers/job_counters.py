"""Counters of a process's models, tables and calls of `fit` in its job, by which servers tell them apart."""

from __future__ import annotations

import collections
import itertools
import secrets
import threading
import weakref

from tfdist.runtime.membership import Membership
from tfdist.strategies.servers.layer_states import LayerStates
from tfdist.strategies.servers.server_tables import ServerConnections


class JobCounters:
    """Counters that all strategies of a process share: a second strategy goes on where the first one is.

    Args:
        servers: the parameter servers of the job.

    Attributes:
        models: names of the models whose optimizers are on servers, in their order.
        program: random number that identifies this process.
        tables: number of tables that were made, by name.
        fits: counter of calls of `fit` with shared data.
        states: non-trainable weights of the models.
    """

    def __init__(self, servers: ServerConnections) -> None:
        self.models: list[str] = []
        self.program = secrets.randbits(63)
        self.tables: collections.Counter[str] = collections.Counter()
        self.fits = itertools.count()
        self.states = LayerStates(lambda: servers.connection(0), servers.member.control.task)


_lock = threading.Lock()
_of_members: weakref.WeakKeyDictionary[Membership, JobCounters] = weakref.WeakKeyDictionary()


def counters_of(servers: ServerConnections) -> JobCounters:
    """Returns the counters of this process in a job.

    Args:
        servers: the parameter servers of the job.
    """
    with _lock:
        counters = _of_members.get(servers.member)
        if counters is None:
            counters = _of_members[servers.member] = JobCounters(servers)
        return counters
