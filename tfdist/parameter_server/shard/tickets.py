"""Pushes of dealt batches: which pushes count, and what other servers have to do with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.protocol.messages import Decision, Pull, Push
from tfdist.parameter_server.shard.ledger import Gradient, Ledger


@dataclass
class Tickets:
    """Bookkeeping of the pushes to one shard whose batches were dealt.

    Attributes:
        ledger: the shard's ledger.
        deals: the job's dealer; None if another server has it, or if batches are not dealt.
        decisions: by worker, the sequence of its last committed push and the decision about it.
    """

    ledger: Ledger
    deals: DealerService | None = None
    decisions: dict[int, tuple[int, Decision]] = field(default_factory=dict)

    def is_refused(self, message: Push) -> bool:
        """Returns whether a push is refused: its batch is neither committed by the worker nor the worker's any more."""
        if self.deals is None or message.ticket is None:
            return False
        worker, ticket = message.worker, message.ticket
        return not self.deals.is_committed(worker, ticket) and not self.deals.may_commit(worker, ticket)

    def counted(self, message: Push) -> Gradient | None:
        """Counts a push that is neither refused nor a duplicate.

        Returns:
            The gradient to keep until it is applied; None if the push is dropped, or is in the snapshot already.
        """
        if self.deals is not None and message.ticket is not None:
            if self.deals.is_committed(message.worker, message.ticket):
                return None  # counted before this server was started again
        elif isinstance(message.dealt, Decision):
            return self.ledger.follow(message.worker, message.sequence, message.read, message.samples, message.dealt)
        return self.ledger.push(message.worker, message.sequence, message.clock, message.read, message.samples)

    def settle(self, message: Push, counted: Gradient | None) -> bool:
        """Commits the batch of a push together with its update, or has it dealt again if the push is dropped.

        Args:
            message: the push.
            counted: result of `counted` for the push.

        Returns:
            Whether the push is dropped.
        """
        if self.deals is None or message.ticket is None:
            return False
        worker, ticket = message.worker, message.ticket
        if counted is None or not counted.scale:
            if self.deals.is_committed(worker, ticket):
                return False
            self.deals.give_back(worker, ticket)
            return True
        round = counted.round if self.ledger.synchronization.in_rounds else None
        clock = self.ledger.workers[message.worker].clock
        self.decisions[message.worker] = message.sequence, Decision(clock, counted.scale, round)
        self.deals.commit(worker, ticket)
        return False

    def updated(self, made_of: Collection[Gradient]) -> None:
        """Records in the decisions which workers' gradients made an update.

        Args:
            made_of: the gradients of the update.
        """
        peers = tuple(sorted({gradient.worker for gradient in made_of if gradient.scale}))
        for known in made_of:
            sequence, decision = self.decisions.get(known.worker, (-1, None))
            if decision is not None and sequence == known.sequence and decision.round is not None:
                self.decisions[known.worker] = sequence, msgspec.structs.replace(decision, peers=peers)

    def decision(self, message: Pull | Push) -> Decision | None:
        """Returns the decision about a push that the other servers follow; None if there is none."""
        if not isinstance(message, Push) or message.ticket is None:
            return None
        sequence, decision = self.decisions.get(message.worker, (-1, None))
        if decision is None or sequence != message.sequence:
            return None
        if self.ledger.synchronization.in_rounds or self.ledger.workers[message.worker].is_active:
            return decision
        return msgspec.structs.replace(decision, clock=None)

    def books(self, waiting: Collection[tuple[int, int]]) -> dict[str, Any] | None:
        """Returns the dealer's state for a snapshot; None if this server has no dealer.

        Args:
            waiting: worker and ticket of each committed batch whose gradients the snapshot lacks.
        """
        return None if self.deals is None else self.deals.state(waiting)
