"""What programs have assigned to a shard's variables; copies and snapshots of the shard keep it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfdist.parameter_server.protocol.messages import AssignValues


@dataclass
class Assignments:
    """The last assignments to a shard's variables, without their values.

    Attributes:
        version: version of the parameters at the last assignment; -1 before the first one.
        puts: by worker, incarnation and id of its last `AssignValues` message that was applied.
    """

    version: int = -1
    puts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def is_duplicate(self, message: AssignValues) -> bool:
        """Returns whether a message has been applied already; others may have made updates since."""
        incarnation, last = self.puts.get(message.worker, (message.incarnation, -1))
        return incarnation == message.incarnation and message.id <= last

    def note(self, message: AssignValues, version: int) -> None:
        """Records an assignment.

        Args:
            message: message whose values were assigned.
            version: current version of the parameters.
        """
        self.version = version
        self.puts[message.worker] = message.incarnation, message.id
