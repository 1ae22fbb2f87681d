"""Weights that no server updates: workers begin with the chief's."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.parameter_server.protocol.messages import CompareState, Refused, StateDiffers, Waiting
from tfdist.parameter_server.protocol.programs import CHIEF, Programs
from tfdist.parameter_server.worker.client import Connection

log = logging.getLogger("tfdist")

Answer = Callable[[Any, Sequence[np.ndarray]], None]

Key = tuple[str, int]
"""Digest of a set of variables, and the number of sets with this digest that came before."""


def digest(array: np.ndarray) -> bytes:
    """Returns a fingerprint of an array's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16).digest()


def take(
    connection: Connection, message: Callable[[int, Sequence[int]], CompareState], arrays: Sequence[np.ndarray]
) -> dict[int, np.ndarray]:
    """Gives this worker's arrays to the server if it is the chief; else takes the chief's arrays that differ.

    Args:
        connection: connection to the server.
        message: function that makes the message with an ``id``, after which the arrays at the given places follow.
        arrays: arrays of this worker.

    Returns:
        By place, the chief's arrays that differ from this worker's; empty on the chief.

    Raises:
        MessageRefusedError: the chief trains another model.
    """
    answer, received = connection.request(lambda id: message(id, ()))
    if message(0, ()).worker != CHIEF:
        if not answer.is_known:
            log.warning(
                "tfdist: the chief is gone, and the parameter server does not have its non-trainable weights: this "
                "worker begins with its own."
            )
        return dict(zip(answer.places, received, strict=True))
    if answer.places:
        lacking = answer.places
        connection.request(lambda id: message(id, lacking), [arrays[place] for place in lacking])
    return {}


class LayerStateStore:
    """A server's copy of the chief's weights that no server updates, for one thread.

    Args:
        is_chief_there: function that returns whether the chief is in the job. If not, no worker waits for it.

    Attributes:
        programs: models that the workers have begun.
        digests: by model, the digests of its weights.
        arrays: by digest, the weight.
    """

    def __init__(self, is_chief_there: Callable[[], bool] = lambda: True) -> None:
        self._is_chief_there = is_chief_there
        self.programs = Programs()
        self.digests: dict[Key, tuple[bytes, ...]] = {}
        self.arrays: dict[bytes, np.ndarray] = {}
        self._parked: list[tuple[CompareState, Answer]] = []

    def heard(self, message: CompareState, arrays: Sequence[np.ndarray], answer: Answer) -> None:
        """Handles a message.

        Args:
            message: message of a worker.
            arrays: arrays that came with the message.
            answer: function that answers the sender; may be called later.
        """
        program = self.programs.note(message)
        if message.worker == CHIEF:
            self._keep(message, arrays, answer)
            for other, why in self.programs.differences(message):
                for parked in [request for request in self._parked if request[0].worker == other.worker]:
                    self._parked.remove(parked)
                    parked[1](Refused(parked[0].id, why), ())
            self._parked = [parked for parked in self._parked if not self._answered(*parked)]
            return
        for _, why in self.programs.differences(message):
            answer(Refused(message.id, why), ())
            return
        self._parked = [
            request for request in self._parked if (request[0].worker, request[0].id) != (message.worker, message.id)
        ]
        if not self._answered(message, answer, may_be_newer=not program.is_first):
            self._parked.append((message, answer))
            answer(Waiting(message.id, (CHIEF,)), ())

    def lost(self, worker: int) -> None:
        """Forgets the requests of a worker that is gone. If it is the chief, waiting workers keep their own weights."""
        self._parked = [request for request in self._parked if request[0].worker != worker]
        if worker == CHIEF:
            for message, answer in self._parked:
                answer(StateDiffers(message.id, (), is_known=False), ())
            self._parked = []

    def _keep(self, message: CompareState, arrays: Sequence[np.ndarray], answer: Answer) -> None:
        for place, array in zip(message.given, arrays, strict=False):
            if 0 <= place < len(message.digests) and digest(array) == message.digests[place]:
                self.arrays[message.digests[place]] = array.copy()
        lacking = tuple(place for place, array_digest in enumerate(message.digests) if array_digest not in self.arrays)
        if not lacking:
            self.digests[message.model, message.occurrence] = message.digests
            used = {array_digest for digests in self.digests.values() for array_digest in digests}
            self.arrays = {array_digest: array for array_digest, array in self.arrays.items() if array_digest in used}
        answer(StateDiffers(message.id, lacking), ())

    def _answered(self, message: CompareState, answer: Answer, may_be_newer: bool = False) -> bool:
        """Answers a worker if the chief has given its weights or is gone, and returns whether it did.

        Args:
            message: message of the worker.
            answer: function that answers the worker.
            may_be_newer: whether the worker has come again, and may have left models out.
        """
        given = self.digests.get((message.model, message.occurrence))
        if given is None and may_be_newer:
            given = next((digests for key, digests in reversed(self.digests.items()) if key[0] == message.model), None)
        if given is None and not self._is_chief_there():
            answer(StateDiffers(message.id, (), is_known=False), ())
            return True
        if given is None:
            return False
        pairs = enumerate(zip(given, message.digests, strict=False))
        differing = [place for place, (of_chief, of_worker) in pairs if of_chief != of_worker]
        answer(StateDiffers(message.id, tuple(differing)), [self.arrays[given[place]] for place in differing])
        return True
