"""Strategies whose parameter servers are threads of this process."""

import contextlib
import dataclasses
from types import SimpleNamespace

import tensorflow as tf

from tests.parameter_server.serving import DEADLINE, serving
from tfdist.cluster.settings import Timeouts
from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.pushes import Gradients, Hogwild
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.strategies.keras import keras_seams
from tfdist.strategies.servers.server_extended import ServerExtended


class Member(SimpleNamespace):
    """A task's membership."""

    __hash__ = object.__hash__


class Served(tf.distribute.Strategy):
    """As `ParameterServerStrategy` on a training task.

    Args:
        servers: running servers.
        worker: number of the task; 0 is the chief.
        arguments: the strategy's arguments.
        workers: number of workers of the cluster.
        before: another strategy of the same process; None for the first one.
        observes: whether the task is an evaluator.
        device: the task's device.
    """

    def __init__(self, servers, worker, arguments, workers=1, before=None, observes=False, device="CPU:0"):
        keras_seams.install()
        self.servers = servers
        self.rank, self.size = worker, workers
        tasks = [SimpleNamespace(job="ps", index=index) for index in range(len(servers))]
        tasks += [SimpleNamespace(job="worker", index=index) for index in range(workers)]
        addresses = {f"address of parameter server {index}": server.address for index, server in enumerate(servers)}
        control = SimpleNamespace(
            task=worker, look_up=addresses.__getitem__, known=addresses.get, failure=None, present={}, watch=id
        )
        member = Member(cluster=SimpleNamespace(tasks=tasks), control=control)
        self.member = member if before is None else before.member
        timeouts = Timeouts(heartbeat=DEADLINE)
        super().__init__(ServerExtended(self, self.member, timeouts, arguments, device, observes))


@contextlib.contextmanager
def served(
    workers=1,
    servers=1,
    mode=Asynchronous(),  # noqa: B008
    pushes=None,
    compression=None,
    pull_compression=None,
    data="own",
    is_lazy=False,
):
    """The strategies of some workers."""
    if pushes is None:
        pushes = Gradients(compression, pull_compression, sparse="lazy" if is_lazy else "exact")
    elif compression is not None:
        pushes = dataclasses.replace(pushes, compression=compression)
    arguments = Arguments(mode, pushes, data=data)
    of_servers = {
        "compression": arguments.compression,
        "pull_compression": arguments.pull_compression,
        "is_lazy": arguments.is_lazy,
        "is_hogwild": isinstance(pushes, Hogwild),
    }
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(serving(mode, deals=None if server else DealerService(), **of_servers))
            for server in range(servers)
        ]
        made = [Served(running, worker, arguments, workers) for worker in range(workers)]
        for strategy in made:
            stack.callback(strategy.extended._close)
        yield made
