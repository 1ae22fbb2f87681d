"""Strategies whose parameter servers are threads of this process."""

import contextlib
from types import SimpleNamespace

import tensorflow as tf

from tests.parameter_server.serving import DEADLINE, serving
from tfdist.cluster.settings import Timeouts
from tfdist.compression.policy import as_policy
from tfdist.parameter_server.staleness import AsItIs
from tfdist.parameter_server.synchronization import Asynchronous
from tfdist.strategies import keras_seams
from tfdist.strategies.parameter_server import ServerExtended


class Served(tf.distribute.Strategy):
    """As `ParameterServerStrategy` on a training task.

    Args:
        servers: that run.
        worker: number of the task; 0 is the chief.
        mode: the servers'.
        workers: that the cluster has.
        pushes: what is pushed.
        compression: of it.
    """

    def __init__(self, servers, worker, mode, workers=1, pushes=None, compression=None):
        keras_seams.install()
        self.servers = servers
        tasks = [SimpleNamespace(job="ps", index=index) for index in range(len(servers))]
        tasks += [SimpleNamespace(job="worker", index=index) for index in range(workers)]
        addresses = {f"address of parameter server {index}": server.address for index, server in enumerate(servers)}
        control = SimpleNamespace(task=worker, look_up=addresses.__getitem__, failure=None)
        member = SimpleNamespace(cluster=SimpleNamespace(tasks=tasks), control=control)
        options = {"clips": not mode.averages, "pushes": pushes, "compression": compression}
        super().__init__(ServerExtended(self, member, Timeouts(heartbeat=DEADLINE), **options))


@contextlib.contextmanager
def served(workers=1, servers=2, mode=Asynchronous(), pushes=None, compression=None, policy=AsItIs()):  # noqa: B008
    """The strategies of some workers."""
    chosen = None if compression is None else as_policy(compression)
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serving(mode, compression=chosen, policy=policy)) for _ in range(servers)]
        made = [Served(running, worker, mode, workers, pushes, chosen) for worker in range(workers)]
        for strategy in made:
            stack.callback(strategy.extended._close)
        yield made
