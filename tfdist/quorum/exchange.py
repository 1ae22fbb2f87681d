"""The weighted mean of the partners' contributions to a meeting, bitwise equal on all of them.

Without compression each partner adds up a part of the vector, in the order of tasks, and sends the mean of that part to
all others. This takes as many bytes as a ring, in two steps. With compression each partner sends its whole payload to
all others, and each decodes all payloads, in the order of tasks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from tfdist.cluster.quorum_messages import Meeting
from tfdist.errors import MismatchError
from tfdist.quorum.members import Members
from tfdist.quorum.messages import ArrayPiece

PIECE_BYTES = 1 << 22
"""Maximum size of a message, so that even a slow connection shows progress."""
_LOOK_SECONDS = 0.2
_OWN, _MEAN = "own ", "mean "

Decode = Callable[[np.ndarray], np.ndarray]


class AbortedError(Exception):
    """The meeting does not count, because a partner was lost or left out."""


class MeetingExchange:
    """The exchange of contributions in one meeting.

    Args:
        members: access to the processes that meet.
        rounds: name of the rounds.
        meeting: meeting in which this process takes part.
    """

    def __init__(self, members: Members, rounds: str, meeting: Meeting) -> None:
        self._members, self._rounds, self._attempt = members, rounds, meeting.attempt
        self._task = members.task
        self._partners = meeting.partners
        self._tasks = [partner.task for partner in meeting.partners]
        self._pieces: dict[tuple[str, int], dict[int, np.ndarray]] = {}

    def weights(self) -> list[float]:
        """Returns each partner's fraction of all samples; equal fractions if there are none."""
        total = sum(partner.samples for partner in self._partners)
        return [partner.samples / total if total else 1 / len(self._partners) for partner in self._partners]

    def mean(self, name: str, vector: np.ndarray) -> np.ndarray:
        """Returns the weighted mean of the partners' vectors.

        Args:
            name: name that distinguishes the vector from others of the meeting.
            vector: flat vector of this process, of the same length on all partners; only read.

        Returns:
            The mean, in an array of its own.

        Raises:
            AbortedError: the meeting is aborted.
            MismatchError: a partner has sent an array of another size or dtype.
        """
        index = self._tasks.index(self._task)
        bounds = [vector.size * place // len(self._tasks) for place in range(len(self._tasks) + 1)]
        parts = [vector[begin:end] for begin, end in itertools.pairwise(bounds)]
        self._send(f"{_OWN}{name}", parts)
        total = np.zeros_like(parts[index])
        for task, weight in zip(self._tasks, self.weights(), strict=True):
            part = parts[index] if task == self._task else self._receive(f"{_OWN}{name}", task, parts[index])
            if weight:  # a contribution of weight 0 may hold NaN
                total += part * vector.dtype.type(weight)
        self._send(f"{_MEAN}{name}", [total] * len(self._tasks))
        means = [
            total if task == self._task else self._receive(f"{_MEAN}{name}", task, part)
            for task, part in zip(self._tasks, parts, strict=True)
        ]
        return np.concatenate(means)

    def mean_of_payloads(self, name: str, payload: np.ndarray, decode: Decode) -> np.ndarray:
        """Returns the weighted mean of vectors that are sent compressed.

        Args:
            name: name that distinguishes the vector from others of the meeting.
            payload: encoded vector of this process (uint8).
            decode: decodes the payload of any partner.

        Returns:
            The mean, in an array of its own.

        Raises:
            AbortedError: the meeting is aborted.
        """
        self._send(f"{_OWN}{name}", [payload] * len(self._tasks))
        total: np.ndarray | None = None
        for task, weight in zip(self._tasks, self.weights(), strict=True):
            other = decode(payload if task == self._task else self._receive(f"{_OWN}{name}", task, None))
            total = np.zeros_like(other) if total is None else total
            if weight:
                total += other * other.dtype.type(weight)
        assert total is not None
        return total

    # Pieces. The last piece of an array is shorter than the others, and may be empty.

    def _send(self, kind: str, arrays: Sequence[np.ndarray]) -> None:
        """Sends an array to each partner, in turns: each gets its first piece before any gets its second."""
        cut = [
            iter(()) if partner.task == self._task else _cut(array)
            for partner, array in zip(self._partners, arrays, strict=True)
        ]
        place, is_left = 0, True
        while is_left:
            is_left = False
            for partner, pieces in zip(self._partners, cut, strict=True):
                if (piece := next(pieces, None)) is not None:
                    message = ArrayPiece(self._rounds, self._attempt, self._task, kind, place)
                    self._members.links.send(partner.address, message, piece)
                    is_left = True
            place += 1

    def _receive(self, kind: str, task: int, like: np.ndarray | None) -> np.ndarray:
        pieces = self._pieces.setdefault((kind, task), {})
        heard = time.monotonic()
        count = len(pieces)
        while (last := _last(pieces)) is None:
            self._take()
            if len(pieces) > count:
                count, heard = len(pieces), time.monotonic()
            elif time.monotonic() - heard > (1 if kind.startswith(_OWN) else 2) * self._members.grace:
                # Wait twice as long for a mean: its sender may itself be waiting for a contribution.
                self._members.lacks(self._rounds, self._attempt, self._silent(kind, task))
                heard = time.monotonic()
        array = np.concatenate([pieces[place] for place in range(last + 1)])
        if like is not None and (array.size != like.size or array.dtype != like.dtype):
            raise MismatchError(
                f"expected {like.dtype} {like.shape} from task {task}; got {array.dtype} {array.shape}. Build the same "
                "model on every task."
            )
        return array

    def _silent(self, kind: str, task: int) -> list[int]:
        """Returns the tasks whose contributions are incomplete; if there are none, the task whose mean is missing."""
        contribution = kind if kind.startswith(_OWN) else kind.replace(_MEAN, _OWN, 1)
        return [
            partner for partner in self._tasks if partner != self._task and not self._is_whole(contribution, partner)
        ] or [task]

    def _is_whole(self, kind: str, task: int) -> bool:
        return _last(self._pieces.get((kind, task), {})) is not None

    def _is_aborted(self) -> bool:
        return self._members.is_aborted(self._rounds, self._attempt)

    def _take(self) -> None:
        """Waits a little for pieces, and stores those that have arrived."""
        links = self._members.links
        with links.arrived:
            came = links.pieces(self._rounds, self._attempt)
            if not came and not self._is_aborted():
                links.arrived.wait(_LOOK_SECONDS)
                came = links.pieces(self._rounds, self._attempt)
        if self._is_aborted():
            raise AbortedError
        for piece, array in came:
            if piece.sender in self._tasks:
                self._pieces.setdefault((piece.kind, piece.sender), {})[piece.place] = array


def _last(pieces: Mapping[int, np.ndarray]) -> int | None:
    """Returns the index of the last piece of an array, which is shorter than the others; None if a piece is missing.

    A piece may be yet to come, or may have been lost when a connection was reset. The sender of an incomplete array
    counts as silent.
    """
    last = min((place for place, piece in pieces.items() if piece.nbytes < PIECE_BYTES), default=None)
    return last if last is not None and all(place in pieces for place in range(last)) else None


def _cut(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the pieces of a flat array, the last of which is shorter than `PIECE_BYTES`."""
    step = PIECE_BYTES // array.itemsize
    for begin in range(0, array.size + 1, step):
        yield array[begin : begin + step]
