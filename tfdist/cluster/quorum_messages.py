"""The messages about rounds that need only a quorum of the training tasks; see `tfdist.cluster.quorums`."""

from __future__ import annotations

import msgspec

from tfdist.cluster.message import RendezvousMessage

# From a task. A message with an ``id`` is answered by a `tfdist.cluster.messages.Reply` with the same ``id``.


class RoundsMessage(RendezvousMessage, frozen=True):
    """Base class of the messages about rounds."""


class Enlist(RoundsMessage, frozen=True):
    """Enlists the task for rounds; the reply is an `Enlisted`, as soon as there is a state to begin with.

    Attributes:
        rounds: name of the rounds.
        address: ``host:port`` at which this task answers other tasks.
        round: number of the round that this task's state comes from; -1 without a state.
        quorum: number of tasks that a round needs.
        grace: seconds for which a round with a quorum waits for more tasks.
        settings: description of the settings, which must be the same on all tasks.
    """

    id: int
    rounds: str
    address: str
    round: int
    quorum: int
    grace: float
    settings: str


class Enlisted(msgspec.Struct, frozen=True):
    """Tells a task where it finds the newest state.

    Attributes:
        round: number of the round that the newest state comes from.
        source: task that has the newest state; None if the task that asked has it itself.
        address: ``host:port`` of the source.
        lost: number of later rounds whose states are lost, of which only one task is told.
    """

    round: int
    source: int | None
    address: str
    lost: int = 0


class ReadyForRound(RoundsMessage, frozen=True):
    """Reports that the task is ready for a round; the reply is a `Meeting`, when the round begins.

    Attributes:
        rounds: name of the rounds.
        round: number of the round: one more than the round of the task's state.
        samples: number of samples behind the task's contribution.
        ends: whether an epoch of the task has ended.
        fit: number of calls of `fit` before this one; None outside of `fit`.
        checksum: checksum of the task's state.
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
        attempt: number of the attempt.
        partners: tasks that take part, in the order of their numbers; empty if this task cannot take part.
        over: whether the other tasks have ended the call of `fit` that this task is in.
        epoch: latest epoch that any task has reached in this call of `fit`.
        astray: whether this task's state differs from the state of the others in the same round.
    """

    attempt: int = 0
    partners: tuple[Partner, ...] = ()
    over: bool = False
    epoch: int = 0
    astray: bool = False


class ContributionsReceived(RoundsMessage, frozen=True):
    """Reports that the task has received all contributions of a meeting.

    The reply is a `MeetingOutcome`, when all partners have reported this, or one of them is lost or left out.
    """

    id: int
    rounds: str
    attempt: int


class MeetingOutcome(msgspec.Struct, frozen=True):
    """The outcome of a meeting: either all partners use it, or none of them does.

    Attributes:
        counts: whether the partners use the meeting's result.
        ends: whether an epoch of a partner has ended.
    """

    counts: bool
    ends: bool = False


class ContributionsMissing(RoundsMessage, frozen=True):
    """Reports that nothing has come from some partners of a meeting for the time of grace."""

    rounds: str
    attempt: int
    tasks: tuple[int, ...]


class ReplaceState(RoundsMessage, frozen=True):
    """Makes the task's changed state the state of all tasks; the reply is the number of the round that it counts as.

    Attributes:
        rounds: name of the rounds.
    """

    id: int
    rounds: str


class FetchEnded(RoundsMessage, frozen=True):
    """Reports that the task waits no more for the state to which the reply to `Enlist` has pointed it.

    Attributes:
        rounds: name of the rounds.
    """

    rounds: str


class AskFirstEpoch(RoundsMessage, frozen=True):
    """Asks at which epoch a call of `fit` begins; the reply is the epoch, or -1 if other tasks have ended this call.

    Attributes:
        fit: number of calls of `fit` before this one.
    """

    id: int
    fit: int


class EpochReached(RoundsMessage, frozen=True):
    """Reports that the task has reached an epoch.

    Attributes:
        fit: number of calls of `fit` before this one.
        epoch: number of the epoch.
    """

    fit: int
    epoch: int


class FitEnded(RoundsMessage, frozen=True):
    """Reports that the task has ended a call of `fit`, and may be about to end.

    The reply, null, comes when no meeting is under way and one of two things holds: this task lacks a newest state,
    which it fetches before it asks again; or no other task in that call, or at its end, lacks one. The reply comes at
    the latest after 10 s or the longest time of grace, whichever is longer.

    Attributes:
        fit: number of calls of `fit` before the one that has ended.
        rounds: names of the rounds of the task's model.
    """

    id: int
    fit: int
    rounds: tuple[str, ...]


# From the server.


class MeetingAborted(RendezvousMessage, frozen=True):
    """Tells that a meeting does not count, because a partner is lost or left out, or has replaced the state."""

    rounds: str
    attempt: int
