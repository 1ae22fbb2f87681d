"""What processes send each other: a few numbers, and arrays of bytes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_WORD = 8


class Kind(enum.IntEnum):
    """What a message says."""

    WEIGHTS = 0
    """The sender's weights in a round, or what they differ by from those that it has sent before."""

    REQUEST = 1
    """The sender's weights; the receiver is to average with them."""

    ANSWER = 2
    """To a request: what the sender of it is to add to its weights."""

    DECLINED = 3
    """To a request: nothing."""

    ENDED = 4
    """The sender has taken its steps; nothing more comes before all have."""

    STOPPED = 5
    """As `ENDED`; and a process wishes that all take no more steps."""

    @property
    def is_end(self) -> bool:
        """Whether nothing more comes from the sender before all have taken their steps."""
        return self in (Kind.ENDED, Kind.STOPPED)


@dataclass(frozen=True)
class Message:
    """A message.

    Attributes:
        kind: what it says.
        round: of the sender, from 0 since all began anew.
        generation: how many times the user's program has assigned values since then.
        parts: arrays; once received, of bytes.
    """

    kind: Kind
    round: int = 0
    generation: int = 0
    parts: Sequence[np.ndarray] = field(default_factory=tuple)

    def packed(self, take: Callable[[int], np.ndarray]) -> np.ndarray:
        """The message as one array of bytes.

        Args:
            take: allocates a number of bytes.
        """
        flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in self.parts]
        sizes = [part.nbytes for part in flat]
        header = np.array([self.kind, self.round, self.generation, len(sizes), *sizes], np.int64).view(np.uint8)
        whole = take(header.nbytes + sum(map(_padded, sizes)))
        whole[: header.nbytes] = header
        place = header.nbytes
        for part in flat:
            whole[place : place + part.nbytes] = part
            place += _padded(part.nbytes)
        return whole

    @classmethod
    def unpacked(cls, whole: np.ndarray) -> Message:
        """The message of an array, of which its parts are views.

        Args:
            whole: as of `packed`.
        """
        kind, number, generation, count = whole[: 4 * _WORD].view(np.int64).tolist()
        place = (4 + count) * _WORD
        parts = []
        for size in whole[4 * _WORD : place].view(np.int64).tolist():
            parts.append(whole[place : place + size])
            place += _padded(size)
        return cls(Kind(kind), number, generation, parts)


def _padded(size: int) -> int:
    return -(-size // _WORD) * _WORD
