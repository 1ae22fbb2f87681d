"""The options that all workers on parameter servers have alike."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.compression.policy import Policy
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.pushes import ElasticAveraging, Hogwild, LocalSteps


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker.

    Attributes:
        clips: whether every gradient is an update of its own, and is therefore clipped by norm before it is sent. The
            norms are then those of whole variables and of all variables, on any number of servers.
        prefetch: number of steps that may be under way while the next one is computed.
        pushes: what is pushed; None pushes gradients.
        compression: compression of pushes; None sends full precision.
        pull_compression: compression of parameters that are read; None sends full precision.
        is_lazy: whether sparse gradients update only the rows that they name.
        shares_data: whether batches are dealt out to all workers.
        workers_wait: whether workers wait for each other.
        bound: the bound of `BoundedStaleness`; None in other modes.
        hierarchy: hierarchy of servers; None if there is none.
        has_copies: whether another server takes over from one that is lost.
        observes: whether this is an evaluator, which reads and does not train.
    """

    clips: bool
    prefetch: int = 0
    pushes: LocalSteps | ElasticAveraging | Hogwild | None = None
    compression: Policy | None = None
    pull_compression: Policy | None = None
    is_lazy: bool = False
    shares_data: bool = False
    workers_wait: bool = False
    bound: int | None = None
    hierarchy: PerHost | None = None
    has_copies: bool = False
    observes: bool = False
