"""The messages between processes that meet in rounds, encoded by `tfdist.parameter_server.protocol.wire`."""

from __future__ import annotations

from tfdist.parameter_server.protocol.wire import Codec, Message


class FetchState(Message, frozen=True):
    """A request for a state.

    Attributes:
        id: id of the request, which the answer repeats.
        rounds: name of the rounds whose state is requested.
    """

    id: int
    rounds: str


class FetchedState(Message, frozen=True):
    """The answer to `FetchState`.

    Its arrays are the common values, the state of the outer optimizer, and that of the inner one.

    Attributes:
        id: id of the request.
        round: round that the common values come from; -1 if the sender has no such state.
        left: number of steps until the sender is ready for the next round.
        step: number of steps that the sender has taken.
        parts: number of arrays of each of the three.
        epoch: epoch of the sender; -1 outside of `fit`.
        rates: learning rates at the beginnings of the last epochs, as `tfdist.quorum.rates.Rates.of_epochs`.
    """

    id: int
    round: int
    left: int = 1
    step: int = 0
    parts: tuple[int, int, int] = (0, 0, 0)
    epoch: int = -1
    rates: tuple[tuple[float, ...], ...] = ()


class ArrayPiece(Message, frozen=True):
    """A piece of an array that a meeting exchanges.

    Attributes:
        rounds: name of the rounds.
        attempt: number of the meeting.
        sender: number of the sending task.
        kind: name of the array, which says whether it is the sender's contribution or a mean.
        place: index of the piece in the array.
    """

    rounds: str
    attempt: int
    sender: int
    kind: str
    place: int


CODEC = Codec(FetchState | FetchedState | ArrayPiece)
