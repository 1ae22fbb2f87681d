"""What workers on parameter servers do alike."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.compression.policy import Policy
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.pushes import ElasticAveraging, Hogwild, LocalSteps


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker.

    Attributes:
        clips: whether every gradient is an update of its own, which is clipped by its norm before it is sent. The norms
            are then those of whole variables and of all of them, on any number of servers.
        prefetch: how many steps may be under way while the next one is computed.
        pushes: what is pushed; None for gradients.
        compression: of it; None for none.
        pull_compression: of parameters; None for none.
        is_lazy: whether sparse gradients update the rows that they name alone.
        shares_data: whether batches are dealt out to all workers.
        workers_wait: whether workers wait for each other.
        bound: of `BoundedStaleness`; None in other modes.
        hierarchy: of servers; None for none.
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
