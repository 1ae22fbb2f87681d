"""The messages between a task and the rendezvous server: JSON objects, one a line, whose ``type`` names the class.

A task's *number* is its place in the cluster's list of tasks. Training tasks come first, so that their numbers are
their ranks. Where a message holds ``members``, they are ranks, and None stands for all of them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tfdist.cluster import quorum_messages as quorums
from tfdist.cluster.message import Message

PROTOCOL = 7
"""Raised whenever the messages change, so that different versions part with a clear error."""

MAX_LINE = 1 << 24
"""Maximum bytes of a message. A longer one ends the connection."""

MAX_HANDSHAKE_LINE = 1 << 13
"""Maximum bytes of a message from a process that has not proven anything yet."""

HEARTBEAT_SECONDS = 1.0
"""How often each side sends a `Ping`."""


# The handshake.


class Claims(msgspec.Struct, frozen=True):
    """What a task states about itself.

    Attributes:
        task: its number; None if the cluster does not list it.
        name: its job and index.
        version: of tfdist.
        digest: the fingerprint of its cluster.
        host: names its machine; see `tfdist.cluster.hosts.host_id`.
        network: names its network interfaces; see `tfdist.cluster.hosts.network_id`.
        hostname: for messages.
        pid: for messages.
    """

    task: int | None
    name: str
    version: str
    digest: str
    host: str = ""
    network: str = ""
    hostname: str = ""
    pid: int = 0


class Challenge(Message, frozen=True):
    """The server's first message."""

    tfdist: int
    nonce: str


class Hello(Message, frozen=True):
    """A task's answer to the challenge."""

    claims: Claims
    nonce: str
    proof: str


class Welcome(Message, frozen=True):
    """The task is admitted.

    Attributes:
        task: its number.
        job: the job's unique name.
        proof: the server's, over the number and the job's name.
    """

    task: int
    job: str
    proof: str = ""


class Refused(Message, frozen=True):
    """The task is not admitted."""

    why: str


# Both ways.


class Ping(Message, frozen=True):
    """A sign of life."""


# From a task. A message with an ``id`` is answered by a `Reply` with the same one.


class Put(Message, frozen=True):
    """Publishes a value. It is forgotten when the task is lost."""

    key: str
    value: str


class Get(Message, frozen=True):
    """Asks for a published value.

    Attributes:
        wait: whether the reply may wait until the value is published; otherwise it is None where there is none.
    """

    id: int
    key: str
    wait: bool


class Gather(Message, frozen=True):
    """Exchanges values among tasks: the reply lists all values, in the order of ``tasks``.

    Attributes:
        tasks: numbers, in the same order in every member's message.
        binds: whether these tasks depend on each other from then on: they start MPI, which cannot take anyone back.
    """

    id: int
    name: str
    tasks: tuple[int, ...]
    value: Any
    binds: bool = False


class Leave(Message, frozen=True):
    """The task's script has ended.

    Attributes:
        failed: by which error; None if by none.
        counts: number of calls of each collective that it has posted, by the key's number.
    """

    failed: str | None
    counts: dict[int, int]


class End(Message, frozen=True):
    """The task has shut MPI down."""


class Fails(Message, frozen=True):
    """The task cannot go on.

    Attributes:
        mismatch: whether that is because tasks do different things.
        members: the ranks that are concerned by a mismatch.
    """

    why: str
    mismatch: bool
    members: tuple[int, ...] | None = None


class Call(msgspec.Struct, frozen=True):
    """One call of a collective.

    Attributes:
        key: of its call site.
        number: by which the ranks know the key; None while they are agreeing on it.
        call: how many calls of the key came before.
        members: the ranks that take part.
        contents: what it carries, in words.
    """

    key: str
    number: int | None
    call: int
    members: tuple[int, ...] | None
    contents: str = ""


class Agree(Message, frozen=True):
    """Asks for the number of a key; the reply comes when all members have asked with the same signature.

    It is an error if all of them wait in calls of different keys, with numbers that nobody knows: then no call counts.
    """

    id: int
    key: str
    signature: str
    members: tuple[int, ...] | None


class Standing(Message, frozen=True):
    """The rank does nothing but wait for a call, perhaps for others that it has posted, too."""

    call: Call
    counts: dict[int, int]
    is_alone: bool


class Moving(Message, frozen=True):
    """Ends `Standing`."""


class Stalled(Message, frozen=True):
    """The rank has waited long in a collective."""

    seconds: float


class State(Message, frozen=True):
    """Answers `Report`: what the rank has under way."""

    under_way: tuple[Call, ...]
    counts: dict[int, int]


class Join(Message, frozen=True):
    """The rank has no more data; see `tfdist.join`."""

    counts: dict[int, int]


class StandIn(msgspec.Struct, frozen=True):
    """Describes a collective to a rank without data; see `tfdist.engine.operations`.

    Attributes:
        what: ``"sum"``, ``"rows"`` or ``"barrier"``.
        dtype: of what is added or gathered.
        shape: of a sum, or of one row.
        algorithm: of a sum.
    """

    what: Literal["sum", "rows", "barrier"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    algorithm: str = ""


class Invite(Message, frozen=True):
    """Invites ranks that have joined to a call.

    Attributes:
        to: the ranks.
        stand_in: how to take part.
    """

    to: tuple[int, ...]
    call: Call
    stand_in: StandIn


# From the server.


class Reply(Message, frozen=True):
    """Answers the message with the same ``id``.

    Attributes:
        value: of `Get`, `Gather` (a list) or `Agree` (a number), or as the message says.
        error: why there is none.
    """

    id: int
    value: Any = None
    error: str | None = None


class Present(Message, frozen=True):
    """A task is there. New tasks receive one for each task, and all tasks receive one for each new task."""

    task: int
    name: str


class Missing(Message, frozen=True):
    """Which training tasks are not there before MPI starts, and who was refused."""

    tasks: tuple[str, ...]
    refused: tuple[str, ...]


class Lost(Message, frozen=True):
    """A task is lost.

    Attributes:
        died: whether its process died or cannot be reached; otherwise it reported an error.
        bound: whether it had started MPI with others; see `Gather`.
    """

    task: int
    why: str
    died: bool
    bound: bool


class Failed(Message, frozen=True):
    """The job cannot start, or ranks do different things (``mismatch``)."""

    why: str
    mismatch: bool


class Left(Message, frozen=True):
    """A task's script has ended without an error; see `Leave`."""

    task: int
    name: str
    counts: dict[int, int]


class AllEnded(Message, frozen=True):
    """All tasks that had started MPI have shut it down."""


class Over(Message, frozen=True):
    """No training task is left: the job is over."""


class Stall(Message, frozen=True):
    """Which ranks are missing from which collectives."""

    why: str


class Report(Message, frozen=True):
    """Asks for the `State`."""


class Joined(Message, frozen=True):
    """A rank has no more data."""

    rank: int
    counts: dict[int, int]


class AllJoined(Message, frozen=True):
    """No rank has more data; ``last`` was the last to say so."""

    last: int


class Invited(Message, frozen=True):
    """Passes an `Invite` on."""

    call: Call
    stand_in: StandIn


FromTask = (
    Ping
    | Put
    | Get
    | Gather
    | Leave
    | End
    | Fails
    | Agree
    | Standing
    | Moving
    | Stalled
    | State
    | Join
    | Invite
    | quorums.Enlist
    | quorums.Ready
    | quorums.Have
    | quorums.Lack
    | quorums.Replace
    | quorums.Where
    | quorums.Linger
    | quorums.Epoch
)
FromServer = (
    Ping
    | Reply
    | Present
    | Missing
    | Lost
    | Failed
    | Left
    | AllEnded
    | Over
    | Stall
    | Report
    | Joined
    | AllJoined
    | Invited
    | quorums.Aborted
)
Answer = Welcome | Refused

_challenge = msgspec.json.Decoder(Challenge)
_hello = msgspec.json.Decoder(Hello)
_answer = msgspec.json.Decoder(Answer)
_from_task = msgspec.json.Decoder(FromTask)
_from_server = msgspec.json.Decoder(FromServer)


def encode(message: Message) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(message) + b"\n"


def challenge(line: bytes) -> Challenge:
    """Decodes the first line of a server. Like all that follow, raises `ValueError` if it is not a valid message."""
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
