"""A parameter server task: it serves its shard until no training task is left."""

from __future__ import annotations

import logging
from pathlib import Path

from tfdist.cluster import hosts
from tfdist.cluster.settings import read_secret
from tfdist.compression.policy import Policy
from tfdist.errors import TfdistError
from tfdist.parameter_server.curve import Keys
from tfdist.parameter_server.dealing.deals import Deals
from tfdist.parameter_server.ledger import Ledger
from tfdist.parameter_server.server import Server
from tfdist.parameter_server.shard import Shard
from tfdist.parameter_server.shards import Shards
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.staleness import StalenessPolicy
from tfdist.parameter_server.synchronization import Synchronization
from tfdist.parameter_server.tables.snapshots import PREFIX, TableSnapshots
from tfdist.parameter_server.tables.tables import Tables
from tfdist.runtime.membership import Membership

log = logging.getLogger("tfdist")


def address_of(server: int) -> str:
    """The key under which a server publishes its address.

    Args:
        server: index of the task among the parameter servers.
    """
    return f"address of parameter server {server}"


class _Watcher:
    """Passes the loss of workers, and the end of the job, on to a server.

    Attributes:
        lost_tasks: those that nobody waits for.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.lost_tasks: set[int] = set()

    def came(self, task: int) -> None:
        """Workers attach by themselves."""
        self.lost_tasks.discard(task)

    def lost(self, task: int, error: TfdistError) -> None:
        """Nobody waits for a lost worker."""
        self.lost_tasks.add(task)
        self._server.lost(task)

    def left(self, task: int) -> None:
        """Nobody waits for a worker that has ended."""
        self.lost_tasks.add(task)
        self._server.lost(task)

    def over(self) -> None:
        """Ends the server."""
        self._server.stop()


def serve(
    member: Membership,
    synchronization: Synchronization,
    policy: StalenessPolicy,
    snapshots: tuple[Path, float] | None = None,
    compression: Policy | None = None,
    is_lazy: bool = False,
) -> None:
    """Serves until the job is over.

    Args:
        member: of a parameter server task.
        synchronization: when updates are applied.
        policy: what late gradients are worth.
        snapshots: their folder, and the seconds between two.
        compression: of gradients, as the workers have it.
        is_lazy: whether sparse gradients update the rows that they name alone.

    Raises:
        TfdistError: the job has failed.
    """
    assert member.cluster is not None
    control, task = member.control, member.cluster.task
    tasks = member.cluster.tasks
    servers = sum(one.job == "ps" for one in tasks)
    awaited = {number for number, one in enumerate(tasks) if one.job in ("chief", "worker")}

    found = sorted(path.name for path in snapshots[0].glob("*/")) if snapshots else []
    found = [name for name in found if not name.startswith(PREFIX)]

    def make(model: str, occurrence: int) -> Shard:
        kept = None
        if snapshots is not None:
            name = f"{model}-{occurrence}" if occurrence else model
            if found and name not in found:
                log.warning(
                    "tfdist: %s has snapshots of other models (%s): this one, %s, begins anew.",
                    *(snapshots[0], ", ".join(found[:3]), name),
                )
            kept = Snapshots(snapshots[0] / name, task.index, servers, snapshots[1])
        return Shard(Ledger(synchronization, policy, awaited=awaited - watcher.lost_tasks), kept, compression, is_lazy)

    def make_snapshots(table: str) -> TableSnapshots:
        assert snapshots is not None
        return TableSnapshots(snapshots[0], table, task.index, servers, snapshots[1])

    keys = Keys.of_secret(read_secret())
    if keys is None:
        _say_who_can_reach(task.address)
    tables = Tables(make_snapshots if snapshots else None)
    deals = Deals(job=control.job) if task.index == 0 else None  # one server deals batches for the whole job
    if deals is not None and snapshots is not None:
        deals.restore(Snapshots.newest_deals(snapshots[0]))
    addresses = [one.address for one in tasks if one.job == "ps"]
    server = Server(Shards(make, tables, deals, [str(one) for one in tasks], addresses), task.address, keys)
    watcher = _Watcher(server)
    control.watch(watcher)
    control.when_failed(lambda error: server.stop())
    control.publish(address_of(task.index), server.address)
    server.run()
    if control.failure is not None:
        raise control.failure


def _say_who_can_reach(address: str) -> None:
    reach = "every process on this machine" if hosts.is_loopback(address) else "everyone who can reach that address"
    log.warning(
        "tfdist: no job secret is set: %s (%s) can read and change the model. Set TFDIST_SECRET to the same value on "
        "every task.",
        *(reach, address),
    )
