"""The messages between a task and the rendezvous server: JSON objects, one a line, whose ``type`` names the class.

A task's *number* is its place in the cluster's list of tasks. Training tasks come first, so that their numbers are
their ranks. In all messages ``members`` are the ranks of a group, and None stands for all ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tfdist.cluster import quorum_messages as quorums
from tfdist.cluster.message import RendezvousMessage

PROTOCOL = 11
"""Version of the messages. It is raised whenever they change, so that different versions end with a clear error."""

MAX_LINE = 1 << 24
"""Maximum bytes of a message. A longer message ends the connection."""

MAX_HANDSHAKE_LINE = 1 << 13
"""Maximum bytes of a message from a process that has not proven anything yet."""

HEARTBEAT_SECONDS = 1.0
"""Seconds between two `Ping` messages of each side."""


# The handshake.


class Claims(msgspec.Struct, frozen=True):
    """A task's statement about itself.

    Attributes:
        task: the task's number; None if the cluster does not list the task.
        name: the task's job and index, as text.
        version: the task's version of tfdist.
        digest: fingerprint of the task's cluster.
        host: name of the task's machine; see `tfdist.cluster.hosts.host_id`.
        network: name of the task's network interfaces; see `tfdist.cluster.hosts.network_id`.
        hostname: hostname of the machine, for error messages.
        pid: process id of the task, for error messages.
    """

    task: int | None
    name: str
    version: str
    digest: str
    host: str = ""
    network: str = ""
    hostname: str = ""
    pid: int = 0


class Challenge(RendezvousMessage, frozen=True):
    """The server's first message."""

    tfdist: int
    nonce: str


class Hello(RendezvousMessage, frozen=True):
    """A task's answer to the challenge."""

    claims: Claims
    nonce: str
    proof: str


class Welcome(RendezvousMessage, frozen=True):
    """Admits the task.

    Attributes:
        task: the task's number.
        job: the job's unique name.
        proof: the server's proof over the task's number and the job's name.
    """

    task: int
    job: str
    proof: str = ""


class AdmissionRefused(RendezvousMessage, frozen=True):
    """Refuses to admit the task."""

    why: str


# Both ways.


class Ping(RendezvousMessage, frozen=True):
    """A sign of life."""


# From a task. A message with an ``id`` is answered by a `Reply` with the same ``id``.


class PublishValue(RendezvousMessage, frozen=True):
    """Publishes a value, until the task is lost."""

    key: str
    value: str


class GetValue(RendezvousMessage, frozen=True):
    """Asks for a published value.

    Attributes:
        wait: whether the reply may wait until the value is published; otherwise a missing value is answered with None.
    """

    id: int
    key: str
    wait: bool


class GatherValues(RendezvousMessage, frozen=True):
    """Exchanges values among tasks: the reply lists all values, in the order of ``tasks``.

    Attributes:
        tasks: numbers of the tasks that take part, in the same order in every task's message.
        binds: whether these tasks depend on each other from then on, because they start MPI, where no process can be
            replaced.
    """

    id: int
    name: str
    tasks: tuple[int, ...]
    value: Any
    binds: bool = False


class ScriptEnded(RendezvousMessage, frozen=True):
    """Reports that the task's script has ended.

    Attributes:
        failed: the error that the script ended with; None without an error.
        counts: number of calls of each collective that the task has posted, by the key's number.
    """

    failed: str | None
    counts: dict[int, int]


class MPIShutDown(RendezvousMessage, frozen=True):
    """Reports that the task has shut MPI down."""


class ReportFailure(RendezvousMessage, frozen=True):
    """Reports that the task cannot go on.

    Attributes:
        why: the reason.
        mismatch: whether the reason is that ranks do different things.
        members: ranks that a mismatch concerns.
    """

    why: str
    mismatch: bool
    members: tuple[int, ...] | None = None


class CollectiveCall(msgspec.Struct, frozen=True):
    """One call of a collective.

    Attributes:
        key: key of the call site.
        number: number that the ranks have agreed on for the key; None before that.
        call: number of earlier calls of the key.
        members: ranks that take part.
        contents: description of the values that the call carries.
    """

    key: str
    number: int | None
    call: int
    members: tuple[int, ...] | None
    contents: str = ""


class AgreeOnKey(RendezvousMessage, frozen=True):
    """Asks for the number of a key; the reply comes when all members have asked with the same signature.

    It is an error if all members wait in calls of different keys whose numbers are not known yet. Then none of these
    calls is counted.
    """

    id: int
    key: str
    signature: str
    members: tuple[int, ...] | None


class WaitingForCall(RendezvousMessage, frozen=True):
    """Reports that the rank does nothing but wait for a call.

    Attributes:
        call: the call that the rank waits for.
        counts: number of calls of each collective that the rank has posted, by the key's number.
        is_alone: whether the call is the only one that the rank has posted and that is under way.
    """

    call: CollectiveCall
    counts: dict[int, int]
    is_alone: bool


class Resumed(RendezvousMessage, frozen=True):
    """Reports that the rank goes on after `WaitingForCall`."""


class Stalled(RendezvousMessage, frozen=True):
    """Reports that the rank has waited long in a collective."""

    seconds: float


class RankStatus(RendezvousMessage, frozen=True):
    """Answers `StatusRequest` with the collectives that the rank has under way."""

    under_way: tuple[CollectiveCall, ...]
    counts: dict[int, int]


class Join(RendezvousMessage, frozen=True):
    """Reports that the rank has no more data; see `tfdist.join`."""

    counts: dict[int, int]


class StandIn(msgspec.Struct, frozen=True):
    """Describes a collective to a rank without data; see `tfdist.engine.operations`.

    Attributes:
        what: kind of the collective: ``"sum"``, ``"rows"`` or ``"barrier"``.
        dtype: dtype of the values that are added or gathered.
        shape: shape of a sum, or of one row.
        algorithm: all-reduce algorithm of a sum.
        divisor: number that a sum is divided by on its way; 0 if it is not.
    """

    what: Literal["sum", "rows", "barrier"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    algorithm: str = ""
    divisor: int = 0


class Invite(RendezvousMessage, frozen=True):
    """Invites ranks that have joined to a call.

    Attributes:
        to: the invited ranks.
        call: the call to take part in.
        stand_in: description of the collective.
    """

    to: tuple[int, ...]
    call: CollectiveCall
    stand_in: StandIn


# From the server.


class Reply(RendezvousMessage, frozen=True):
    """Answers the message with the same ``id``.

    Attributes:
        value: the answer: a published value to `GetValue`, a list to `GatherValues`, a number to `AgreeOnKey`; for
            other messages as their descriptions say.
        error: the reason if the request was refused; then there is no value.
    """

    id: int
    value: Any = None
    error: str | None = None


class TaskPresent(RendezvousMessage, frozen=True):
    """Tells that a task is there.

    A new task receives one such message for each task, and all tasks receive one for each new task.
    """

    task: int
    name: str


class MissingTasks(RendezvousMessage, frozen=True):
    """Lists the training tasks that have not come before MPI starts, and the tasks that were refused."""

    tasks: tuple[str, ...]
    refused: tuple[str, ...]


class TaskLost(RendezvousMessage, frozen=True):
    """Tells that a task is lost.

    Attributes:
        died: whether the task's process died or cannot be reached; otherwise it reported an error.
        bound: whether the task had started MPI with others; see `GatherValues`.
    """

    task: int
    why: str
    died: bool
    bound: bool


class JobFailed(RendezvousMessage, frozen=True):
    """Tells that the job cannot start, or that ranks do different things (``mismatch``)."""

    why: str
    mismatch: bool


class TaskFinished(RendezvousMessage, frozen=True):
    """Tells that a task's script has ended without an error; see `ScriptEnded`."""

    task: int
    name: str
    counts: dict[int, int]


class AllMPIShutDown(RendezvousMessage, frozen=True):
    """Tells that all tasks that had started MPI have shut it down."""


class JobOver(RendezvousMessage, frozen=True):
    """Tells that no training task is left: the job is over."""


class StallReport(RendezvousMessage, frozen=True):
    """Explains which ranks are missing from which collectives.

    Attributes:
        why: the explanation.
        late: names of the ranks that are missing from a collective, or do not answer; by rank.
    """

    why: str
    late: dict[int, str]


class StatusRequest(RendezvousMessage, frozen=True):
    """Asks a rank for its `RankStatus`."""


class RankJoined(RendezvousMessage, frozen=True):
    """Tells that a rank has no more data."""

    rank: int
    counts: dict[int, int]


class AllJoined(RendezvousMessage, frozen=True):
    """Tells that no rank has more data.

    Attributes:
        last: the rank that joined last.
        counts: number of calls of each collective that some rank had posted when it joined.
    """

    last: int
    counts: dict[int, int]


class Invited(RendezvousMessage, frozen=True):
    """Passes an `Invite` on to an invited rank."""

    call: CollectiveCall
    stand_in: StandIn


FromTask = (
    Ping
    | PublishValue
    | GetValue
    | GatherValues
    | ScriptEnded
    | MPIShutDown
    | ReportFailure
    | AgreeOnKey
    | WaitingForCall
    | Resumed
    | Stalled
    | RankStatus
    | Join
    | Invite
    | quorums.Enlist
    | quorums.ReadyForRound
    | quorums.ContributionsReceived
    | quorums.ContributionsMissing
    | quorums.ReplaceState
    | quorums.FetchEnded
    | quorums.AskFirstEpoch
    | quorums.FitEnded
    | quorums.EpochReached
)
FromServer = (
    Ping
    | Reply
    | TaskPresent
    | MissingTasks
    | TaskLost
    | JobFailed
    | TaskFinished
    | AllMPIShutDown
    | JobOver
    | StallReport
    | StatusRequest
    | RankJoined
    | AllJoined
    | Invited
    | quorums.MeetingAborted
)
Answer = Welcome | AdmissionRefused

_challenge = msgspec.json.Decoder(Challenge)
_hello = msgspec.json.Decoder(Hello)
_answer = msgspec.json.Decoder(Answer)
_from_task = msgspec.json.Decoder(FromTask)
_from_server = msgspec.json.Decoder(FromServer)


def encode(message: RendezvousMessage) -> bytes:
    """Encodes a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def challenge(line: bytes) -> Challenge:
    """Decodes the first line of a server. Like the functions below, raises `ValueError` for an invalid message."""
    return _challenge.decode(line)


def hello(line: bytes) -> Hello:
    """Decodes the first line of a task."""
    return _hello.decode(line)


def answer(line: bytes) -> Answer:
    """Decodes the server's answer to `Hello`."""
    return _answer.decode(line)


def from_task(line: bytes) -> FromTask:
    """Decodes a line of an admitted task."""
    return _from_task.decode(line)


def from_server(line: bytes) -> FromServer:
    """Decodes a line of a server after the handshake."""
    return _from_server.decode(line)
