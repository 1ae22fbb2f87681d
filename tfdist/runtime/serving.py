"""A parameter server task: it serves its shards until no training task is left."""

from __future__ import annotations

import logging
import threading

from tfdist.cluster import hosts
from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.errors import TfdistError
from tfdist.parameter_server.curve import Keys
from tfdist.runtime.membership import Membership
from tfdist.runtime.server_host import Host
from tfdist.runtime.server_state import Options, Template

log = logging.getLogger("tfdist")


def serve(member: Membership, options: Options, replicas: int, timeouts: Timeouts) -> None:
    """Serves until the job is over.

    Args:
        member: of a parameter server task.
        options: of the servers, as the workers have them.
        replicas: 2 for a copy of each server's state on the next server.
        timeouts: how long to wait for the next server.

    Raises:
        TfdistError: the job has failed.
    """
    assert member.cluster is not None
    control, task, tasks = member.control, member.cluster.task, member.cluster.tasks
    keys = Keys.of_secret(read_secret())
    if keys is None:
        _say_who_can_reach(task.address)
    servers = [number for number, one in enumerate(tasks) if one.job == "ps"]
    own = [task.index] if replicas == 1 else [task.index, (task.index - 1) % len(servers)]
    templates = [Template(options, tasks, server, control.job) for server in own]
    running = [Host(control, tasks, replicas > 1, template) for template in templates]

    def stop(error: TfdistError) -> None:
        for host in running:
            host.stop()

    failures: list[BaseException] = []

    def run(host: Host) -> None:
        try:
            host.run(keys, timeouts)
        except BaseException as error:
            failures.append(error)
            stop(TfdistError(str(error)))

    control.when_failed(stop)
    threads = [threading.Thread(target=run, args=(host,), name="tfdist-server") for host in running[1:]]
    for thread in threads:
        thread.start()
    run(running[0])
    for thread in threads:
        thread.join()
    if control.failure is not None:
        raise control.failure
    if failures:
        raise failures[0]


def _say_who_can_reach(address: str) -> None:
    reach = "every process on this machine" if hosts.is_loopback(address) else "everyone who can reach that address"
    log.warning(
        "tfdist: no job secret is set: %s (%s) can read and change the model. Set TFDIST_SECRET to the same value on "
        "every task.",
        *(reach, address),
    )
