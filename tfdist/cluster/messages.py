"""The messages between a task and the rendezvous server: JSON objects, one a line, whose ``type`` names the class.

A task's *number* is its place in the cluster's list of tasks. Training tasks come first, so that their numbers are
their ranks. Where a message holds ``members``, they are ranks, and None stands for all of them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PROTOCOL = 6
"""Raised whenever the messages change, so that different versions part with a clear error."""

MAX_LINE = 1 << 24
"""Maximum bytes of a message. A longer one ends the connection."""

MAX_HANDSHAKE_LINE = 1 << 13
"""Maximum bytes of a message from a process that has not proven anything yet."""

HEARTBEAT_SECONDS = 1.0
"""How often each side sends a `Ping`."""


class Message(msgspec.Struct, frozen=True, tag=str.lower, tag_field="type"):
    """Base of all messages."""


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
    """Asks for the number of a key; the reply comes when all members have asked with the same signature."""

    id: int
    key: str
    signature: str
    members: tuple[int, ...] | None


class Standing(Message, frozen=True):
    """The rank does nothing but wait for a call."""

    call: Call
    counts: dict[int, int]


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


# Rounds that a quorum of the training tasks is enough for; see `tfdist.cluster.quorums`.


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
    """

    id: int
    rounds: str
    round: int
    samples: int
    ends: bool
    fit: int | None


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
    """

    attempt: int = 0
    partners: tuple[Partner, ...] = ()
    over: bool = False
    epoch: int = 0


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


class Rest(OfRounds, frozen=True):
    """The task has no steps to take for now; rounds do not wait for it."""

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


# From the server.


class Aborted(Message, frozen=True):
    """A meeting will not come about: a partner is lost."""

    rounds: str
    attempt: int


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
    | Enlist
    | Ready
    | Have
    | Lack
    | Rest
    | Where
    | Epoch
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
    | Aborted
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
