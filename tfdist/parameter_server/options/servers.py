"""Options for how parameter servers keep their state: snapshots, and copies on other servers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tfdist.parameter_server.options.concise import Concise


@dataclass(frozen=True, repr=False, kw_only=True)
class SnapshotOptions(Concise):
    """Base of the options of servers that may write snapshots.

    Attributes:
        snapshots: folder in which the servers write snapshots, and from which they continue, even in a job with another
            number of servers; the same for all servers. None for no snapshots.
        snapshot_seconds: seconds between two snapshots.
    """

    snapshots: str | os.PathLike[str] | None = None
    snapshot_seconds: float = 60.0

    def __post_init__(self) -> None:
        name, seconds = type(self).__name__, self.snapshot_seconds
        if "://" in str(self.snapshots):
            raise ValueError(f"{name}(snapshots=…) must be a folder of a file system; got {self.snapshots}")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds <= 0:
            raise ValueError(f"{name}(snapshot_seconds=…) must be a number of seconds above 0; got {seconds!r}")
        if self.snapshots is not None:
            object.__setattr__(self, "snapshots", os.fspath(self.snapshots))


@dataclass(frozen=True, repr=False)
class Servers(SnapshotOptions):
    """Variables are divided over all servers, and each worker pushes to all of them.

    Attributes:
        snapshots: folder in which the servers write snapshots, and from which they continue, even in a job with another
            number of servers; the same for all servers. None for no snapshots.
        snapshot_seconds: seconds between two snapshots.
        copies: 1 to keep a copy of each server's state on the next server, which takes over if the first one dies. No
            update that a server has acknowledged is lost then. Needs two servers or more.
    """

    copies: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies not in (0, 1) or isinstance(self.copies, bool):
            raise ValueError(f"Servers(copies=…) must be 0 or 1; got {self.copies!r}")
