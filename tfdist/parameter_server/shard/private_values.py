"""What a store of values answers about memory that workers could open, if it has none."""

from __future__ import annotations

from tfdist.parameter_server.protocol.anonymous_memory import MemoryLocation
from tfdist.parameter_server.shard.ledger import Ledger


class PrivateValues:
    """Base class of stores whose values only the server changes."""

    def opened(self, worker: int) -> tuple[MemoryLocation, int]:
        """Refuses to let a worker open the memory of the values.

        Raises:
            ValueError: always.
        """
        raise ValueError("this server has no shared memory: give all tasks pushes=Hogwild()")

    def settle(self, ledger: Ledger) -> None:
        """Does nothing: workers make no updates that the ledger lacks."""
