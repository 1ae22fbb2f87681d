"""The option for a hierarchy of servers: one on each host, below root servers."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist import whole_numbers
from tfdist.parameter_server.options.servers import SnapshotOptions
from tfdist.parameter_server.options.staleness import Unscaled
from tfdist.parameter_server.options.synchronization import SoftSync, Synchronization


@dataclass(frozen=True, repr=False)
class PerHost(SnapshotOptions):
    """A server on each host joins the gradients of the host's workers, and pushes them to the root servers as one.

    The first ``roots`` tasks of the job ``ps`` are the roots: they have the variables and the optimizer. Each further
    task is the server of the workers whose addresses name the same host as its own. Workers without a server on their
    host push to the roots.

    Attributes:
        synchronization: mode between the workers of a host, which says which gradients are joined and which workers
            wait. The strategy's own ``synchronization`` then applies between hosts, and has the policy for late
            gradients.
        roots: number of root servers, at least 1.
        snapshots: folder in which the roots write snapshots, as in `Servers`. None for no snapshots.
        snapshot_seconds: seconds between two snapshots.

    References:
        Gupta, Zhang and Wang, *Model accuracy and runtime tradeoff in distributed deep learning: a systematic study*,
        ICDM 2016 (Rudra-adv).
    """

    synchronization: Synchronization = SoftSync(1)  # noqa: RUF009
    roots: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.synchronization, Synchronization):
            raise ValueError(
                f"PerHost(synchronization=…) must be a mode such as SoftSync(); got {self.synchronization!r}"
            )
        if not isinstance(self.synchronization.late, Unscaled):
            raise ValueError(
                "PerHost(synchronization=…) takes no late=, because the root servers scale late gradients: give late= "
                f"to the strategy's synchronization=; got {self.synchronization!r}"
            )
        whole_numbers.check("PerHost(roots=…)", self.roots)
