"""The parameter servers of a job, as its workers reach them, and the tables of embeddings on them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable

from tfdist.cluster.control import Watcher
from tfdist.cluster.settings import Timeouts
from tfdist.errors import PeerLostError, TfdistError
from tfdist.parameter_server.hierarchy.places import places_of
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.tables.client import TableClient, TableConnections, TableSpec
from tfdist.parameter_server.tables.row_cache import CachePolicy
from tfdist.parameter_server.worker.client import Connection
from tfdist.runtime import server_address
from tfdist.runtime.membership import Membership
from tfdist.tensors import unnumbered

log = logging.getLogger("tfdist")


class ServerConnections:
    """The parameter servers of a task's job; with a hierarchy, its root servers.

    Args:
        member: the task's membership.
        timeouts: how long to wait for servers.
        hierarchy: servers of hosts, if each host has one; None if workers push to all servers.
        has_copies: whether the next server has a copy of each server's state, and takes over from it.
        ended: yields why nobody needs to wait for a server any more, beside the failure of the job.

    Attributes:
        member: membership of the task.
        tasks: tasks of the job.
        numbers: numbers of the servers' tasks, in the order of the servers.
        own: number of the server of this task's host; None if it has none.
    """

    def __init__(
        self,
        member: Membership,
        timeouts: Timeouts,
        hierarchy: PerHost | None = None,
        has_copies: bool = False,
        ended: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        assert member.cluster is not None
        self.member = member
        self.tasks = member.cluster.tasks
        places = places_of(self.tasks, hierarchy)
        self.numbers = list(places.roots)
        self.own = places.server_of(member.control.task)
        self._timeouts = timeouts
        self._has_copies = has_copies
        self._ended = ended

    def __len__(self) -> int:
        return len(self.numbers)

    def connection(self, server: int) -> Connection:
        """Returns a new connection to a server, once it has published its address.

        Args:
            server: place of the server among the servers.

        Raises:
            RequestTimeoutError: the server did not publish its address in time.
        """
        return self._connection(self.numbers[server], f"ps {server}")

    def _connection(self, number: int, name: str) -> Connection:
        control = self.member.control
        return server_address.connection(
            control,
            self.tasks,
            number,
            name,
            self._timeouts,
            self._has_copies,
            failure=lambda: control.failure or self._ended(),
        )

    def of_model(self, stack: contextlib.ExitStack) -> list[Connection]:
        """Returns new connections for this task's gradients: to the server of its host, else to all servers."""
        if self.own is None:
            return self.connections(stack)
        made = self._connection(self.own, f"ps {self.tasks[self.own].index}")
        stack.callback(made.close)
        return [made]

    def connections(self, stack: contextlib.ExitStack) -> list[Connection]:
        """Returns new connections to all servers, closed by ``stack``: open ones would keep the process from ending."""
        made = []
        for server in range(len(self)):
            made.append(self.connection(server))
            stack.callback(made[-1].close)
        return made


class ServerTables(Watcher):
    """Tables of embeddings on all servers of a job.

    Args:
        servers: the parameter servers of the job.
        workers: number of workers that update each table together, once in each step; 0 if each gradient is an update.
            Where workers wait for each other, a server that is lost ends the job: its rows are gone, and the weights of
            all workers belong to them.
        prefix: prefix of the tables' names, the same on all workers. Objects of this class in a process have different
            prefixes, or share ``numbers``.
        numbers: counter of the tables by name; None for a new one.
    """

    def __init__(
        self,
        servers: ServerConnections,
        workers: int = 0,
        prefix: str = "",
        numbers: collections.Counter[str] | None = None,
    ) -> None:
        self._servers = servers
        self._workers = workers
        self._prefix = prefix
        self._line: TableConnections | None = None
        self._numbers: collections.Counter[str] = collections.Counter() if numbers is None else numbers
        self._lock = threading.Lock()
        if workers:
            servers.member.control.watch(self)

    @property
    def failure(self) -> TfdistError | None:
        """The error that ended the communication about tables, or None."""
        line = self._line  # which another thread may close
        return None if line is None else line.failure

    def table(self, name: str, form: TableSpec, cache: CachePolicy | None = None) -> TableClient:
        """Returns a new table, which other workers get by the same calls.

        Args:
            name: name of the layer.
            form: number of columns, initial values and policy of the table.
            cache: which rows this worker keeps; None keeps none.

        Raises:
            ValueError: ``cache`` is given, but workers update together.
            TfdistError: a server cannot be reached.
        """
        if cache is not None and self._workers:
            raise ValueError(
                f"{cache} keeps rows of the layer {name} that other workers may have updated, but AllReduceStrategy "
                "trains as one process does. Leave out cache=, or use tfdist.ParameterServerStrategy."
            )
        with self._lock:
            if self._line is None:
                with contextlib.ExitStack() as stack:
                    self._line = TableConnections(self._servers.connections(stack), self._servers.member.control.task)
                    stack.pop_all()
            base = self._prefix + unnumbered(name)
            place = self._numbers[base]
            self._numbers[base] += 1
        return TableClient(self._line, f"{base}-{place}", dataclasses.replace(form, workers=self._workers), cache)

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None

    def lost(self, task: int, error: TfdistError) -> None:
        """Ends this process's part of the job if the lost task is a server with tables."""
        if task in self._servers.numbers and self._line is not None:
            why = f"{error} Rows of embeddings were on it. Start the job again, from a backup or a saved model."
            self._servers.member.control.fail(PeerLostError(why))
