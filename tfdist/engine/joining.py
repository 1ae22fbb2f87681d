"""What a rank without more data does for the others: it stands in, with nothing to add, until all are done.

A rank that joins tells the rendezvous server, which tells everyone. From then on the lowest rank that has not joined
invites those that have to each collective, over the server, with a description of what to take part in.

References:
    `horovod.tensorflow.join`, whose meaning this keeps.
"""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.barrier import barrier
from tfdist.collectives.schedule import Plan
from tfdist.errors import TfdistError

if TYPE_CHECKING:
    from tfdist.engine.engine import Engine

_POLL_SECONDS = 1e-3


def sum_of(elements: int, dtype: np.dtype, algorithm: str) -> dict[str, Any]:
    """Describes an all-reduce that adds."""
    return {"what": "sum", "elements": elements, "dtype": dtype.name, "algorithm": algorithm}


def rows_of(shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """Describes an all-gather of rows.

    Args:
        shape: of a row.
        dtype: of the rows.
    """
    return {"what": "rows", "shape": list(shape), "dtype": dtype.name}


def everyone_comes() -> dict[str, Any]:
    """Describes a barrier."""
    return {"what": "barrier"}


def plan_of(stand_in: dict[str, Any]) -> Plan:
    """Takes part in what is described, with zeros or with no rows."""
    if stand_in["what"] == "barrier":
        return barrier()
    import ml_dtypes  # noqa: F401  (its dtypes are known to NumPy by name from then on)

    dtype = np.dtype(stand_in["dtype"])
    if stand_in["what"] == "rows":
        return all_gather_rows(np.empty((0, *stand_in["shape"]), dtype))
    return ALGORITHMS[stand_in["algorithm"]](np.zeros(stand_in["elements"], dtype))


class Attendance:
    """The engine's part in joining; notified of the other ranks on the control connection's thread.

    Args:
        engine: whose collectives these are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._invitations: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._early: list[dict[str, Any]] = []
        self._last: int | None = None

    def join(self) -> int:
        """Stands in for this rank until every rank has joined; returns the last one."""
        engine = self._engine
        control = engine.control
        if control is None:
            return 0
        self._last = None
        control.send({"type": "join", "counts": engine.counts()})
        while self._last is None or not self._invitations.empty():
            while not self._invitations.empty():
                self._stand_in(self._invitations.get())
            engine.check()
            if not engine.advance():
                time.sleep(_POLL_SECONDS)
        engine.drain()
        return self._last

    def _stand_in(self, call: dict[str, Any]) -> None:
        engine = self._engine
        members = call["members"] and tuple(call["members"])
        engine.learn(call["key"], members, call["number"])
        begun = engine.calls_of(call["key"], members)
        if begun < call["call"]:
            self._early.append(call)  # the invitation to the call before it is on its way
        elif begun == call["call"]:  # else an earlier invitation to it has been followed
            engine.post(call["key"], plan_of(call["stand_in"]), members=members, overlaps=False)
            early, self._early = self._early, []
            for other in early:
                self._stand_in(other)

    def invite(self, call: dict[str, Any], stand_in: dict[str, Any] | None) -> None:
        """Invites the ranks that have joined to a call that this rank has posted, if this rank is the one that invites.

        Args:
            call: as of `tfdist.engine.pending.Pending.describe`.
            stand_in: how to take part.
        """
        engine = self._engine
        control = engine.control
        if control is None or not control.joined or stand_in is None:
            return
        joined = dict(control.joined)
        if call["number"] is None:
            return  # the ranks are agreeing on it; the engine invites when they have
        members = range(engine.size) if call["members"] is None else call["members"]
        if engine.rank != min(set(members) - set(joined), default=-1):
            return
        absent = [
            rank
            for rank, counts in joined.items()
            if rank in members and counts.get(str(call["number"]), 0) <= call["call"]
        ]
        if absent:
            control.send({"type": "invite", "to": absent, "stand_in": stand_in, **call})

    # What the control connection tells.

    def state(self) -> dict[str, Any]:
        """What this rank has under way."""
        return self._engine.state()

    def rank_joined(self) -> None:
        """Invites it to what is under way already."""
        for pending in self._engine.under_way():
            self.invite(pending.describe(), pending.stand_in)

    def all_joined(self, last: int) -> None:
        """Ends `join`."""
        self._last = last

    def survives(self, rank: int, error: TfdistError) -> bool:
        """Asks the engine."""
        return self._engine.survives(rank, error)

    def invited(self, call: dict[str, Any]) -> None:
        """Keeps the invitation for the thread that has joined."""
        self._invitations.put(call)
