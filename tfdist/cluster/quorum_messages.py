"""The messages about rounds that a quorum of the training tasks is enough for; see `tfdist.cluster.quorums`."""

from __future__ import annotations

import msgspec

from tfdist.cluster.message import Message

# From a task. A message with an ``id`` is answered by a `tfdist.cluster.messages.Reply` with the same one.


class OfRounds(Message, frozen=True):
    """Base of the messages about such rounds."""


class Enlist(OfRounds, frozen=True):
    """The task takes part in rounds from now on; the reply is an `Enlisted`, once there is a state to begin with.

    Attributes:
        rounds: their name.
        address: ``host:port`` at which this task answers others.
        round: of the state that this task has; -1 for none.
        quorum: how many tasks a round needs.
        grace: seconds for which it waits for more.
        settings: that all tasks must have alike, in words.
    """

    id: int
    rounds: str
    address: str
    round: int
    quorum: int
    grace: float
    settings: str


class Enlisted(msgspec.Struct, frozen=True):
    """Where a task finds the newest state.

    Attributes:
        round: of that state.
        source: the task that has it; None if that is the one which asked.
        address: of the source.
    """

    round: int
    source: int | None
    address: str


class Ready(OfRounds, frozen=True):
    """The task is ready for a round; the reply is a `Meeting`, when it begins.

    Attributes:
        rounds: their name.
        round: number of the round, one more than that of the task's state.
        samples: that the task's contribution stands for.
        ends: whether an epoch of the task has ended.
        fit: how many calls of `fit` came before this one; None outside of `fit`.
        checksum: of the task's state.
    """

    id: int
    rounds: str
    round: int
    samples: int
    ends: bool
    fit: int | None
    checksum: int


class Partner(msgspec.Struct, frozen=True):
    """A task that takes part in a meeting."""

    task: int
    samples: int
    address: str


class Meeting(msgspec.Struct, frozen=True):
    """An attempt to make a round.

    Attributes:
        attempt: its number.
        partners: who takes part, by task; nobody if it has been made without the task that is ready.
        over: whether the others have ended the `fit` that the task is in.
        epoch: the last one that a task has come to in this `fit`.
        astray: whether the task has another state than the others, of the same round.
    """

    attempt: int = 0
    partners: tuple[Partner, ...] = ()
    over: bool = False
    epoch: int = 0
    astray: bool = False


class Have(OfRounds, frozen=True):
    """The task has what it needs of a meeting; the reply is an `Outcome`, when all have, or one is lost."""

    id: int
    rounds: str
    attempt: int


class Outcome(msgspec.Struct, frozen=True):
    """What has become of a meeting: all who met use it, or nobody does.

    Attributes:
        counts: whether it is used.
        ends: whether an epoch of a partner has ended.
    """

    counts: bool
    ends: bool = False


class Lack(OfRounds, frozen=True):
    """Nothing has come from some partners of a meeting for the time of grace."""

    rounds: str
    attempt: int
    tasks: tuple[int, ...]


class Replace(OfRounds, frozen=True):
    """The task has given its state other values, which are to be those of all; the reply is the round that it is of.

    Attributes:
        rounds: their name.
    """

    id: int
    rounds: str


class Where(OfRounds, frozen=True):
    """Asks at which epoch a call of `fit` begins; the reply is its number, or -1 if others have ended this call.

    Attributes:
        fit: how many calls came before.
    """

    id: int
    fit: int


class Epoch(OfRounds, frozen=True):
    """The task has come to an epoch.

    Attributes:
        fit: how many calls of `fit` came before this one.
        epoch: its number.
    """

    fit: int
    epoch: int


class Linger(OfRounds, frozen=True):
    """The task has ended a call of `fit`, and may be about to end.

    The reply, null, comes when no round of that call is under way, and this task lacks the newest state of some, which
    it gets before it comes back, or all others that are in that call, or end it, have them; at the latest after the
    time of grace, or 10 s.

    Attributes:
        fit: how many calls of `fit` came before that one.
        rounds: the names of those of its model.
    """

    id: int
    fit: int
    rounds: tuple[str, ...]


# From the server.


class Aborted(Message, frozen=True):
    """A meeting will not come about: a partner is lost."""

    rounds: str
    attempt: int
