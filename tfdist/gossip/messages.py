"""Messages between neighbours: a few numbers, and arrays of bytes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_WORD = 8


class MessageKind(enum.IntEnum):
    """The kind of a message."""

    WEIGHTS = 0
    """The sender's weights in a round, or their differences from those that it has sent before."""

    REQUEST = 1
    """The sender's weights; the receiver is to average with them."""

    ANSWER = 2
    """Answer to a request: the change that the requesting process adds to its weights."""

    DECLINED = 3
    """Answer to a request: no change."""

    ENDED = 4
    """The sender has taken its steps, and sends nothing more before all processes have taken theirs."""

    STOPPED = 5
    """The same as `ENDED`; and a process requests that all take no more steps."""

    @property
    def is_end(self) -> bool:
        """Whether the sender sends nothing more before all processes have taken their steps."""
        return self in (MessageKind.ENDED, MessageKind.STOPPED)


@dataclass(frozen=True)
class GossipMessage:
    """A message to a neighbour.

    Attributes:
        kind: kind of the message.
        round: round of the sender, from 0 since all processes began anew.
        generation: how many times the user's program has assigned values since then.
        parts: arrays of the message; arrays of bytes once it is received.
    """

    kind: MessageKind
    round: int = 0
    generation: int = 0
    parts: Sequence[np.ndarray] = field(default_factory=tuple)

    def packed(self, take: Callable[[int], np.ndarray]) -> np.ndarray:
        """Returns the message as one array of bytes.

        Args:
            take: allocates an array of a number of bytes.
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
    def unpacked(cls, whole: np.ndarray) -> GossipMessage:
        """Returns the message that an array holds; its parts are views of the array.

        Args:
            whole: array of bytes that `packed` returned.
        """
        kind, number, generation, count = whole[: 4 * _WORD].view(np.int64).tolist()
        place = (4 + count) * _WORD
        parts = []
        for size in whole[4 * _WORD : place].view(np.int64).tolist():
            parts.append(whole[place : place + size])
            place += _padded(size)
        return cls(MessageKind(kind), number, generation, parts)


def _padded(size: int) -> int:
    return -(-size // _WORD) * _WORD
