"""The messages between processes that meet in rounds, encoded by `tfdist.parameter_server.protocol.wire`."""

from __future__ import annotations

from tfdist.parameter_server.protocol.wire import Codec, Message


class Fetch(Message, frozen=True):
    """Asks for a state.

    Attributes:
        id: of the answer.
        rounds: whose state it is.
    """

    id: int
    rounds: str


class State(Message, frozen=True):
    """Answers `Fetch`. The arrays are the common values, the state of their outer optimizer, and that of the inner one.

    Attributes:
        id: as of `Fetch`.
        round: that the common values come from; -1 if there is no such state here.
        left: steps that the sender takes until it is ready for the next round.
        step: how many it has taken.
        parts: how many arrays there are of each of the three.
        epoch: in which the sender is; -1 outside of `fit`.
        rates: as of `tfdist.quorum.rates.Rates.of_epochs`.
    """

    id: int
    round: int
    left: int = 1
    step: int = 0
    parts: tuple[int, int, int] = (0, 0, 0)
    epoch: int = -1
    rates: tuple[tuple[float, ...], ...] = ()


class Piece(Message, frozen=True):
    """A piece of what a meeting exchanges; one array.

    Attributes:
        rounds: of the meeting.
        attempt: of the meeting.
        sender: number of the task.
        kind: of what it is a piece: of the sender's contribution, or of a mean, each with a name.
        place: which piece it is, in order.
    """

    rounds: str
    attempt: int
    sender: int
    kind: str
    place: int


CODEC = Codec(Fetch | State | Piece)
