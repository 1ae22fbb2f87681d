"""What a process has begun in its job so far. Servers tell its models, tables and fits apart by their numbers."""

from __future__ import annotations

import collections
import itertools
import secrets
import threading
import weakref

from tfdist.runtime.membership import Membership
from tfdist.strategies.servers.layer_states import LayerStates
from tfdist.strategies.servers.server_tables import Servers


class Begun:
    """What all strategies of a process have begun: a second strategy goes on counting where the first one is.

    Args:
        servers: of the job.

    Attributes:
        models: the names of models whose optimizers are on servers, in their order.
        program: a random number of this process.
        tables: how many tables were made, by name.
        fits: numbers calls of `fit` with shared data.
        states: the models' non-trainable weights.
    """

    def __init__(self, servers: Servers) -> None:
        self.models: list[str] = []
        self.program = secrets.randbits(63)
        self.tables: collections.Counter[str] = collections.Counter()
        self.fits = itertools.count()
        self.states = LayerStates(lambda: servers.connection(0), servers.member.control.task)


_lock = threading.Lock()
_of_members: weakref.WeakKeyDictionary[Membership, Begun] = weakref.WeakKeyDictionary()


def of(servers: Servers) -> Begun:
    """What this process has begun in a job.

    Args:
        servers: of the job.
    """
    with _lock:
        found = _of_members.get(servers.member)
        if found is None:
            found = _of_members[servers.member] = Begun(servers)
        return found
