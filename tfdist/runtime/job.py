"""The job of this process, which enters a job once and leaves it at its end."""

from __future__ import annotations

import threading

from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import Cluster
from tfdist.errors import ClusterSpecError
from tfdist.runtime import leave, membership, start
from tfdist.runtime.membership import Membership

_entered: Membership | None = None
_lock = threading.Lock()


def current() -> Membership | None:
    """Returns the membership of this process; None if it has not entered a job, or has left it."""
    return None if _entered is None or _entered.is_closed else _entered


def enter(cluster: Cluster | None, timeouts: Timeouts) -> Membership:
    """Enters a job, once per process; later calls return the same membership.

    Args:
        cluster: the tasks and this process's own task; None for the job of an MPI launcher, where MPI starts at once.
        timeouts: the deadlines for waits for other tasks.

    Raises:
        RendezvousError: the chief cannot be reached, or refused this process.
        ClusterSpecError: this process has entered another job.
    """
    global _entered
    with _lock:
        if _entered is None or _entered.is_closed:
            _entered = membership.of_task(cluster, timeouts) if cluster else start.under_launcher(timeouts)
            leave.arrange(_entered)
        if (
            _entered.cluster is not None
            and cluster is not None
            and _differs_only_in_elasticity(_entered.cluster, cluster)
        ):
            raise ClusterSpecError(
                "QuorumStrategy, whose processes come and go, cannot be used in one job with tfdist.init or another "
                "strategy, whose processes all stay to the end. Leave out tfdist.init and the other strategies, and "
                "use strategy.rank and strategy.size."
            )
        if _entered.cluster != cluster:
            raise ClusterSpecError(
                f"this process has already entered a job ({_entered.cluster or 'of an MPI launcher'}), and can enter "
                f"only one; got {cluster}."
            )
        return _entered


def _differs_only_in_elasticity(one: Cluster, other: Cluster) -> bool:
    return one.has_elastic_workers != other.has_elastic_workers and (one.tasks, one.task) == (other.tasks, other.task)
