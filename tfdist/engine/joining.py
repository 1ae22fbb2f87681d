"""Joining: a rank without more data takes part in the others' collectives, with nothing to add, until all have joined.

A rank that joins tells the rendezvous server, which tells all ranks. From then on the lowest rank that has not joined
invites the joined ranks to each collective, over the server, with a description of the collective.

References:
    `horovod.tensorflow.join`, which has the same meaning.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfdist.cluster.messages import CollectiveCall, Invite, Invited, Join, RankStatus, StandIn
from tfdist.engine import operations
from tfdist.engine.patience import RUN_WITHOUT_A_RANK
from tfdist.errors import PeerLostError, TfdistError

if TYPE_CHECKING:
    from tfdist.engine.engine import Engine
    from tfdist.engine.pending import Pending

_POLL_SECONDS = 1e-3


class JoinCoordinator:
    """The engine's part in joining; a `tfdist.cluster.control.Listener`.

    Args:
        engine: the engine of the collectives.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._invitations: queue.SimpleQueue[Invited] = queue.SimpleQueue()
        self._early: list[Invited] = []
        self._last: int | None = None
        self._counts: dict[int, int] = {}
        self._has_joined = False

    def join(self) -> int:
        """Takes part without data until every rank has joined; returns the rank that joined last.

        Raises:
            PeerLostError: others have called what cannot run without this rank, before they knew that it had joined.
        """
        engine = self._engine
        control = engine.control
        if control is None:
            return 0
        self._last = None
        control.send(Join(engine.numbers.counts()))
        self._has_joined = True
        try:
            while self._last is None or not self._invitations.empty():
                while not self._invitations.empty():
                    self._stand_in(self._invitations.get())
                engine.check()
                if not engine.advance():
                    time.sleep(_POLL_SECONDS)
            engine.drain()
        finally:
            self._has_joined = False
        self._compare_calls()
        return self._last

    def _compare_calls(self) -> None:
        calls = self._engine.numbers.counts()
        for number, count in self._counts.items():
            if number >= 0 and calls.get(number, count) < count:  # others are numbers of each rank's own
                raise PeerLostError(
                    f"rank {self._engine.rank} has called join(), and others have called "
                    f"{self._engine.numbers.name_of(number)} since. {RUN_WITHOUT_A_RANK}"
                )

    def check(self, pending: Pending, members: Sequence[int]) -> None:
        """Refuses a call that needs a rank that has joined; it could end here before that is noticed.

        Args:
            pending: the call.
            members: ranks that take part.

        Raises:
            PeerLostError: there is such a rank.
        """
        engine, control = self._engine, self._engine.control
        if control is None or self._has_joined or pending.operation.stand_in is not None:
            return
        number = engine.numbers.of((pending.members, pending.key))
        for rank, counts in dict(control.joined).items():
            is_missing = number is None or counts.get(number, 0) <= pending.call
            if rank in members and is_missing:
                raise PeerLostError(
                    f"rank {engine.rank} calls {pending.name}, but rank {rank} has called join(). {RUN_WITHOUT_A_RANK}"
                )

    def _stand_in(self, invitation: Invited) -> None:
        engine, call = self._engine, invitation.call
        assert call.number is not None
        site = (call.members, call.key)
        engine.agreed(site, call.number)
        begun = engine.numbers.posted(site)
        if begun < call.call:
            self._early.append(invitation)  # the invitation to the call before is still on its way
        elif begun == call.call:  # otherwise this rank has followed an earlier invitation to this call
            plan = operations.without_data(invitation.stand_in)
            engine.post(call.key, plan, members=call.members, overlaps=False)
            early, self._early = self._early, []
            for other in early:
                self._stand_in(other)

    def invite(self, call: CollectiveCall, stand_in: StandIn | None) -> None:
        """Invites the ranks that have joined to a call, if this rank is responsible for inviting them.

        Args:
            call: the call that this rank has posted.
            stand_in: description of the collective; None if ranks without data cannot take part.
        """
        engine = self._engine
        control = engine.control
        if control is None or not control.joined or stand_in is None:
            return
        joined = dict(control.joined)
        if call.number is None:
            return  # the ranks have not agreed on the number yet; the engine invites afterwards
        members = range(engine.size) if call.members is None else call.members
        if engine.rank != min(set(members) - set(joined), default=-1):
            return
        absent = tuple(
            rank for rank, counts in joined.items() if rank in members and counts.get(call.number, 0) <= call.call
        )
        if absent:
            control.send(Invite(absent, call, stand_in))

    # Messages of the control connection.

    def state(self) -> RankStatus:
        """Returns which collectives this rank has under way."""
        return self._engine.state()

    def rank_joined(self) -> None:
        """Invites the joined rank to the calls that are under way already."""
        for pending in self._engine.under_way():
            self.invite(pending.describe(), pending.operation.stand_in)

    def all_joined(self, last: int, counts: Mapping[int, int]) -> None:
        """Lets `join` end and return the last rank."""
        self._counts = dict(counts)
        self._last = last

    def survives(self, rank: int, error: TfdistError) -> bool:
        """Asks the engine whether it can go on without a lost rank."""
        return self._engine.survives(rank, error)

    def invited(self, invitation: Invited) -> None:
        """Keeps the invitation for the thread that has joined."""
        self._invitations.put(invitation)
