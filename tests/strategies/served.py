"""Strategies whose parameter servers are threads of this process."""

import contextlib
from types import SimpleNamespace

import tensorflow as tf

from tests.parameter_server.serving import DEADLINE, serving
from tfdist.cluster.settings import Timeouts
from tfdist.parameter_server.deals import Deals
from tfdist.parameter_server.synchronization import Asynchronous
from tfdist.strategies import keras_seams
from tfdist.strategies.parameter_server import ServerExtended


class Served(tf.distribute.Strategy):
    """As `ParameterServerStrategy` on a training task.

    Args:
        servers: that run.
        worker: number of the task; 0 is the chief.
        mode: the servers'.
        data: as of `ParameterServerStrategy`.
    """

    def __init__(self, servers, worker, mode, data="own"):
        keras_seams.install()
        self.servers = servers
        tasks = [SimpleNamespace(job="ps", index=index) for index in range(len(servers))]
        addresses = {f"address of parameter server {index}": server.address for index, server in enumerate(servers)}
        control = SimpleNamespace(task=worker, look_up=addresses.__getitem__, failure=None)
        member = SimpleNamespace(cluster=SimpleNamespace(tasks=tasks), control=control)
        options = {"clips": not mode.averages, "shares_data": data == "shared", "workers_wait": mode.lead() is not None}
        super().__init__(ServerExtended(self, member, Timeouts(heartbeat=DEADLINE), **options))


@contextlib.contextmanager
def served(workers=1, servers=2, mode=Asynchronous(), data="own"):  # noqa: B008
    """The strategies of some workers."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serving(mode, deals=None if server else Deals())) for server in range(servers)]
        made = [Served(running, worker, mode, data) for worker in range(workers)]
        for strategy in made:
            stack.callback(strategy.extended._close)
        yield made
