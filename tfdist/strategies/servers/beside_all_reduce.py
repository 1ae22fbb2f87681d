"""Parameter servers beside all-reduce: they keep the rows of embeddings, and nothing else."""

from __future__ import annotations

import atexit

from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import Cluster
from tfdist.engine.group import ProcessGroup
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.runtime import job, serving
from tfdist.strategies.servers.server_tables import ServerConnections, ServerTables


def serve(cluster: Cluster, timeouts: Timeouts) -> None:
    """Serves until the job is over.

    Args:
        cluster: the cluster, with the task of this server.
        timeouts: how long to wait for other tasks.

    Raises:
        TfdistError: the job has failed.
    """
    serving.serve(job.enter(cluster, timeouts), Arguments(), timeouts)


def tables(cluster: Cluster, workers: ProcessGroup, timeouts: Timeouts) -> ServerTables:
    """Returns the tables of a strategy, which stay open until the process ends.

    Args:
        cluster: the cluster, with the task of this worker.
        workers: the workers that train together.
        timeouts: how long to wait for servers.
    """
    number = workers.number("tables")
    servers = ServerConnections(job.enter(cluster, timeouts), timeouts)
    made = ServerTables(servers, workers=workers.size, prefix=f"strategy {number} " if number else "")
    atexit.register(made.close)
    return made
