"""Runs a parameter server task, which serves its shards until no training task is left."""

from __future__ import annotations

import threading

import keras

from tfdist.cluster import descriptors
from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.cluster.spec import Cluster
from tfdist.errors import TfdistError
from tfdist.notices import notice
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.runtime import agreement, job
from tfdist.runtime.membership import Membership, say_who_can
from tfdist.runtime.server_host import Host
from tfdist.runtime.server_state import ServerStateFactory


def serve(member: Membership, options: Arguments, timeouts: Timeouts) -> None:
    """Serves until the job is over.

    Args:
        member: this parameter server's membership in the job.
        options: the arguments of the workers' strategy.
        timeouts: how long to wait for other servers.

    Raises:
        TfdistError: the job has failed.
    """
    assert member.cluster is not None
    control, task, tasks = member.control, member.cluster.task, member.cluster.tasks
    keys = Keys.of_secret(read_secret())
    descriptors.raise_file_limit()
    if keys is None:
        say_who_can(task.address, "read and change the model")
    servers = [number for number, other in enumerate(tasks) if other.job == "ps"]
    hosted = [task.index, (task.index - 1) % len(servers)] if options.has_copies else [task.index]
    templates = [ServerStateFactory(options, tasks, server, control, timeouts) for server in hosted]
    running = [Host(control, tasks, options.has_copies, template) for template in templates]

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
    for error in [*(error for error in failures if isinstance(error, KeyboardInterrupt)), control.failure, *failures]:
        if error is not None:
            raise error


def serve_without_script(cluster: Cluster, timeouts: Timeouts) -> None:
    """Enters a job as a parameter server, and serves with the options of the workers' strategy until it is over.

    Args:
        cluster: the job's cluster; its own task is this server.
        timeouts: the deadlines for waits for other tasks.

    Raises:
        TfdistError: the chief cannot be reached, the job has failed, or an option is only available with the script.
    """
    member = job.enter(cluster, timeouts)
    try:
        options = agreement.wait_for_options(member, timeouts.start)
        if options is None:
            return
        made = options.arguments()
        told = made.synchronization, made.pushes, made.servers
        notice("tfdist serve: %s serves with %s, %s, %s.", cluster.task, *told)
        keras.config.set_floatx(options.floatx)
        serve(member, made, timeouts)
    except TfdistError as error:
        if member.control.failure is None:
            member.control.tell_failure(error)
        raise
