"""The arguments of `ParameterServerStrategy`: what users choose, tasks compare, and servers and workers act upon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.compression.policy import Policy
from tfdist.parameter_server.options.combinations import EXCLUSIONS
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.pushes import ElasticAveraging, Gradients, Hogwild, LocalSteps, policy_of
from tfdist.parameter_server.options.servers import Servers
from tfdist.parameter_server.options.synchronization import Asynchronous, Synchronization

_KINDS: dict[str, tuple[Any, str]] = {
    "synchronization": (Synchronization, "Asynchronous(), BoundedStaleness(4), SoftSync(2) or Synchronous()"),
    "pushes": (
        Gradients | LocalSteps | ElasticAveraging | Hogwild,
        "Gradients(), LocalSteps(8), ElasticAveraging() or Hogwild()",
    ),
    "servers": (Servers | PerHost, "Servers() or PerHost()"),
}
"""By argument, its type, and examples."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of `tfdist.ParameterServerStrategy` that all tasks have alike.

    Attributes:
        synchronization: when servers apply updates, and what late gradients are worth.
        pushes: what workers push, and how it is sent.
        servers: how servers keep their state, and whether each host has one of its own.
        data: "own" if each worker trains on its own data, "shared" if batches are dealt out to all workers.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument has a value that it may not have, or does not go with another one.
    """

    synchronization: Synchronization = Asynchronous()  # noqa: RUF009
    pushes: Gradients | LocalSteps | ElasticAveraging | Hogwild = Gradients()  # noqa: RUF009
    servers: Servers | PerHost = Servers()  # noqa: RUF009
    data: str = "own"

    def __post_init__(self) -> None:
        for name, (kind, examples) in _KINDS.items():
            given = getattr(self, name)
            if isinstance(given, type) or not isinstance(given, kind):
                raise TypeError(
                    f"{name} must be an object of tfdist.parameter_server, such as {examples}; got {given!r}"
                )
        if self.data not in ("own", "shared"):
            raise ValueError(f'data must be "own" or "shared"; got {self.data!r}')
        for one, other, why in EXCLUSIONS:
            first, second = getattr(self, one.argument), getattr(self, other.argument)
            if one.is_made(first) and other.is_made(second):
                raise ValueError(
                    f"{one.argument}={first!r} does not go with {other.argument}={second!r}: {why}. Leave one of the "
                    "two out."
                )

    @property
    def gradients(self) -> Gradients:
        """How gradients are pushed; the defaults if workers push something else."""
        return self.pushes if isinstance(self.pushes, Gradients) else Gradients()

    @property
    def makes_updates(self) -> bool:
        """Whether a worker's own optimizer makes the updates, and what they have changed is pushed."""
        return not isinstance(self.pushes, Gradients)

    @property
    def compression(self) -> Policy | None:
        """How what is pushed is compressed; None for full precision."""
        return None if isinstance(self.pushes, Hogwild) else policy_of(self.pushes.compression)

    @property
    def pull_compression(self) -> Policy | None:
        """How the parameters that workers get back are compressed; None for full precision."""
        return policy_of(self.gradients.parameters)

    @property
    def is_lazy(self) -> bool:
        """Whether sparse gradients update only the rows that they name."""
        return self.gradients.sparse == "lazy"

    @property
    def hierarchy(self) -> PerHost | None:
        """The servers of hosts; None if workers push to all servers."""
        return self.servers if isinstance(self.servers, PerHost) else None

    @property
    def has_copies(self) -> bool:
        """Whether the next server has a copy of each server's state."""
        return isinstance(self.servers, Servers) and self.servers.copies > 0

    @property
    def snapshots(self) -> tuple[Path, float] | None:
        """Folder of snapshots, and the seconds between two; None if servers write none."""
        folder = self.servers.snapshots
        return None if folder is None else (Path(folder), self.servers.snapshot_seconds)

    @property
    def averages(self) -> bool:
        """Whether servers average the gradients of several workers before an update."""
        return any(mode.averages for mode in self._modes)

    @property
    def workers_wait(self) -> bool:
        """Whether a worker may have to wait for others."""
        return any(mode.lead() is not None for mode in self._modes)

    @property
    def bound(self) -> int | None:
        """How many steps a worker may be ahead of the slowest one, without rounds; None if there is no such bound."""
        bounds = [None if mode.in_rounds else mode.lead() for mode in self._modes]
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def _modes(self) -> list[Synchronization]:
        """The modes on a gradient's way: with servers of hosts, the one between their workers, too."""
        return [self.synchronization, *([] if self.hierarchy is None else [self.hierarchy.synchronization])]
