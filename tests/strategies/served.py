"""Strategies whose parameter servers are threads of this process."""

import contextlib
from types import SimpleNamespace

import tensorflow as tf

from tests.parameter_server.serving import DEADLINE, serving
from tfdist.cluster.settings import Timeouts
from tfdist.compression.policy import as_policy
from tfdist.parameter_server.dealing.deals import Deals
from tfdist.parameter_server.options.pushes import Hogwild
from tfdist.parameter_server.options.staleness import Unscaled
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.strategies.keras import keras_seams
from tfdist.strategies.servers.server_extended import ServerExtended
from tfdist.strategies.servers.worker_options import WorkerOptions


class Member(SimpleNamespace):
    """A task's membership."""

    __hash__ = object.__hash__


class Served(tf.distribute.Strategy):
    """As `ParameterServerStrategy` on a training task.

    Args:
        servers: running servers.
        worker: number of the task; 0 is the chief.
        mode: synchronization of the servers.
        workers: number of workers of the cluster.
        before: another strategy of the same process; None for the first one.
        options: options of the worker; see `WorkerOptions`.
    """

    def __init__(self, servers, worker, mode, workers=1, before=None, **options):
        keras_seams.install()
        self.servers = servers
        tasks = [SimpleNamespace(job="ps", index=index) for index in range(len(servers))]
        tasks += [SimpleNamespace(job="worker", index=index) for index in range(workers)]
        addresses = {f"address of parameter server {index}": server.address for index, server in enumerate(servers)}
        control = SimpleNamespace(
            task=worker, look_up=addresses.__getitem__, known=addresses.get, failure=None, present={}, watch=id
        )
        own = Member(cluster=SimpleNamespace(tasks=tasks), control=control)
        self.member = own if before is None else before.member
        options |= {"clips": not mode.averages, "workers_wait": mode.lead() is not None}
        options["bound"] = None if mode.in_rounds else mode.lead()
        super().__init__(ServerExtended(self, self.member, Timeouts(heartbeat=DEADLINE), WorkerOptions(**options)))


@contextlib.contextmanager
def served(
    workers=1,
    servers=2,
    mode=Asynchronous(),  # noqa: B008
    pushes=None,
    compression=None,
    policy=Unscaled(),  # noqa: B008
    pull_compression=None,
    data="own",
    is_lazy=False,
):
    """The strategies of some workers."""
    chosen = None if compression is None else as_policy(compression)
    of_pulls = None if pull_compression is None else as_policy(pull_compression)
    of_all = {"compression": chosen, "pull_compression": of_pulls, "is_lazy": is_lazy}
    of_servers = {**of_all, "is_hogwild": isinstance(pushes, Hogwild)}
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(serving(mode, policy=policy, deals=None if server else Deals(), **of_servers))
            for server in range(servers)
        ]
        options = {"pushes": pushes, "shares_data": data == "shared", **of_all}
        made = [Served(running, worker, mode, workers, **options) for worker in range(workers)]
        for strategy in made:
            stack.callback(strategy.extended._close)
        yield made
