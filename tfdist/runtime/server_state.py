"""Makes the state that a parameter server begins with: its shards, tables and dealer, and their snapshots."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from tfdist.cluster.control import Control
from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import Task
from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.hierarchy.places import places_of
from tfdist.parameter_server.hierarchy.shard import HostShard, RootAccess
from tfdist.parameter_server.hierarchy.uplink import Ended
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.protocol.programs import CHIEF
from tfdist.parameter_server.server.shards import Shards
from tfdist.parameter_server.shard.features import features_of
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard
from tfdist.parameter_server.shard.stores import new_store_of
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.tables.snapshots import PREFIX, TableSnapshots
from tfdist.parameter_server.tables.tables import Tables
from tfdist.parameter_server.worker.client import Connection
from tfdist.runtime import server_address

log = logging.getLogger("tfdist")


class ServerStateFactory:
    """Makes the state of one parameter server.

    Args:
        options: the arguments of the job's strategy.
        tasks: tasks of the job, by number.
        server: index of the server.
        control: this task's membership.
        timeouts: the deadlines for a host's server that waits for the roots.

    Attributes:
        server: index of the server.
        tell: function that calls a function on the server's thread; must be set before the server serves.
    """

    def __init__(
        self,
        options: Arguments,
        tasks: Sequence[Task],
        server: int,
        control: Control,
        timeouts: Timeouts = Timeouts(),  # noqa: B008
    ) -> None:
        self._options = options
        self._tasks = tasks
        self.server = server
        self._control = control
        self._timeouts = timeouts
        self._places = places_of(tasks, options.hierarchy)
        self._above: RootAccess | None = None
        number = next(number for number, task in enumerate(tasks) if task.job == "ps" and task.index == server)
        self._of_host = number if number in self._places.workers else None
        self._servers = [tasks[place].address for place in (self._places.roots if self._of_host is None else [number])]
        self.tell: Callable[[Callable[[], None]], None] | None = None
        self._keeps_snapshots = False
        folders = options.snapshots[0].glob("*/") if options.snapshots else ()
        self._found = sorted(path.name for path in folders if not path.name.startswith(PREFIX))

    def leading(self) -> Shards:
        """Returns the state of a leading server, which keeps snapshots and goes on from earlier ones."""
        self._keeps_snapshots = self._options.snapshots is not None and self._of_host is None
        made = self.following()
        if made.deals is not None and self._options.snapshots is not None:
            made.deals.restore(Snapshots.newest_deals(self._options.snapshots[0]))
        return made

    def following(self) -> Shards:
        """Returns the state of a following server, whose leader keeps the snapshots."""
        deals = (
            DealerService(job=self._control.job) if self.server == 0 else None
        )  # one server deals batches for the whole job
        chief: int | None = self._places.chief
        if self._of_host is not None:
            chief = CHIEF if chief == self._of_host else None
        return Shards(
            self._shard,
            Tables(self._of_table),
            deals,
            self._names,
            self._servers,
            lambda: 0 in self._control.present,
            chief,
        )

    def take_over(self, shards: Shards) -> None:
        """Has a server that has followed keep snapshots, as it leads from now on.

        Args:
            shards: the server's state.
        """
        if self._options.snapshots is not None:
            self._keeps_snapshots = True
            shards.keep_snapshots(self._of_model)
            shards.tables.keep_snapshots()

    def _names(self) -> list[str]:
        """Returns the names of all tasks, by number, including workers that the cluster does not list."""
        present = self._control.present.copy()  # the listening thread changes the original
        more = range(len(self._tasks), max(present, default=-1) + 1)
        return [*map(str, self._tasks), *(present.get(number, f"task {number}") for number in more)]

    def _shard(self, model: str, occurrence: int) -> Shard:
        if self._of_host is not None:
            return self._shard_of_host(self._of_host)
        kept = self._of_model(model, occurrence) if self._keeps_snapshots else None
        awaited = set(self._places.members)
        mode = self._options.synchronization
        return Shard(
            Ledger(mode, awaited=awaited),
            kept,
            features_of(self._options),
            new_store_of(self._options),
        )

    def _shard_of_host(self, number: int) -> HostShard:
        """Returns a shard that joins its workers' gradients. Only the roots scale late gradients."""
        hierarchy, workers = self._options.hierarchy, set(self._places.workers[number])
        assert hierarchy is not None
        assert self.tell is not None
        if self._above is None:
            self._above = RootAccess(number, self._places.roots, CHIEF in workers, self._connected, self.tell)
        return HostShard(Ledger(hierarchy.synchronization, awaited=workers), above=self._above)

    def _connected(self, stack: contextlib.ExitStack, ended: Ended) -> list[Connection]:
        """Returns connections of a host's server to the roots."""
        made = []
        for place, root in enumerate(self._places.roots):
            made.append(
                server_address.connection(
                    self._control,
                    self._tasks,
                    root,
                    f"ps {place}",
                    self._timeouts,
                    self._options.has_copies,
                    failure=lambda: self._control.failure or ended(),
                )
            )
            stack.callback(made[-1].close)
        return made

    def _of_model(self, model: str, occurrence: int) -> Snapshots:
        assert self._options.snapshots is not None
        folder, seconds = self._options.snapshots
        name = f"{model}-{occurrence}" if occurrence else model
        if self._found and name not in self._found:
            log.warning(
                "tfdist: %s has snapshots of other models only (%s): the model %s starts without a snapshot.",
                folder,
                ", ".join(self._found[:3]),
                name,
            )
        return Snapshots(folder / name, self.server, len(self._servers), seconds)

    def _of_table(self, table: str) -> TableSnapshots | None:
        if not self._keeps_snapshots:
            return None
        assert self._options.snapshots is not None
        folder, seconds = self._options.snapshots
        return TableSnapshots(folder, table, self.server, len(self._servers), seconds)
