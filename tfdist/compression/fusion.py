"""Requests of compressed tensors to other ranks, and their fusion: one collective serves all tensors of a bucket."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.all_gather import all_gather
from tfdist.collectives.all_to_all import all_to_all
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator

Chooser = Callable[[int], str]
"""Returns the all-reduce algorithm for a vector of the given number of bytes."""


@dataclass(frozen=True)
class SumRequest:
    """Requests the sum of a vector over all ranks; the answer is a new array.

    Attributes:
        vector: one-dimensional; of the same dtype on all ranks.
    """

    vector: np.ndarray


@dataclass(frozen=True)
class MaximumRequest:
    """Requests the element-wise maximum of a vector over all ranks; the answer is a new array.

    Attributes:
        vector: one-dimensional; of the same dtype on all ranks.
    """

    vector: np.ndarray


@dataclass(frozen=True)
class ExchangeRequest:
    """Sends a payload to every rank; the answer is the payloads of all ranks for this one, by rank.

    Attributes:
        payloads: payload for each rank; payloads for the same rank have the same length on all ranks.
    """

    payloads: Sequence[np.ndarray]


@dataclass(frozen=True)
class GatherRequest:
    """Requests the payloads of all ranks, which are passed to `read` one by one; the answer is None.

    Attributes:
        payload: this rank's payload.
        read: called with a rank and its payload; in the order of the ranks, as soon as all earlier ones have arrived.
        sizes: the sizes of the payloads, by rank; None if the ranks do not know each other's.
    """

    payload: np.ndarray
    read: Callable[[int, np.ndarray], object]
    sizes: Sequence[int] | None = None


Request = SumRequest | MaximumRequest | ExchangeRequest | GatherRequest

Reduction = Generator[Request, Any, None]
"""The reduction of one tensor: a generator that yields requests, and is sent the answers."""


@dataclass
class Traffic:
    """Bytes of a tensor, over all steps.

    Attributes:
        given_bytes: the size of the tensor itself.
        sent_bytes: bytes sent to other ranks; for sums and maxima, those that a ring would send.
        plain_bytes: bytes without compression: those of a ring all-reduce, or of parts that go to their owners.
    """

    given_bytes: int = 0
    sent_bytes: int = 0
    plain_bytes: int = 0


def fuse_reductions(reductions: Sequence[tuple[Reduction, Traffic]], choose: Chooser) -> Plan:
    """Runs the reductions of several tensors at once: their next requests share one collective of each kind.

    Args:
        reductions: the tensors' reductions, whose requests are of the same kinds on all ranks, with the traffic to
            count their bytes in. They are started here; the part after the first answer runs in the plan.
        choose: chooses the algorithm for sums and maxima.

    Returns:
        A plan for the engine. Its result is None.
    """
    first = _asked(reductions, dict.fromkeys(range(len(reductions))))

    def schedule(comm: Communicator, tag: int) -> Schedule:
        asked = first
        while asked:
            answers: dict[int, Any] = {}
            for kind, collective in _COLLECTIVES.items():
                places = [place for place, request in asked.items() if isinstance(request, kind)]
                if not places:
                    continue
                results = yield from collective([asked[place] for place in places], comm, tag, choose)
                for place, (answer, sent_bytes) in zip(places, results, strict=True):
                    answers[place] = answer
                    reductions[place][1].sent_bytes += sent_bytes
            asked = _asked(reductions, answers)

    return schedule


def _asked(reductions: Sequence[tuple[Reduction, Traffic]], answers: Mapping[int, Any]) -> dict[int, Request]:
    """Returns the next requests of the reductions that continue after these answers, in order."""
    asked = {}
    for place, answer in sorted(answers.items()):
        try:
            asked[place] = reductions[place][0].send(answer)
        except StopIteration:
            pass
    return asked


# Each collective serves several requests of its kind, and returns their answers and the bytes sent for each.


def _combined(
    requests: Sequence[SumRequest | MaximumRequest], comm: Communicator, tag: int, choose: Chooser, combine: np.ufunc
) -> Schedule:
    answers: dict[int, np.ndarray] = {}
    for dtype in dict.fromkeys(request.vector.dtype for request in requests):
        vectors = {place: request.vector for place, request in enumerate(requests) if request.vector.dtype == dtype}
        vector = _joined(list(vectors.values()))
        total = np.empty_like(vector)
        yield from ALGORITHMS[choose(total.nbytes)](total, combine, source=vector)(comm, tag)
        answers.update(zip(vectors, _cut(total, [part.size for part in vectors.values()]), strict=True))
    return [(answers[place], ring_bytes(answers[place].nbytes, comm.size)) for place in range(len(requests))]


def _exchange(requests: Sequence[ExchangeRequest], comm: Communicator, tag: int, choose: Chooser) -> Schedule:
    given = [_joined([request.payloads[rank] for request in requests]) for rank in range(comm.size)]
    arrived = [np.empty_like(given[comm.rank]) for _ in given]
    yield from all_to_all(given, arrived)(comm, tag)
    sizes = [request.payloads[comm.rank].size for request in requests]
    answers = list(zip(*(_cut(payloads, sizes) for payloads in arrived), strict=True))
    sent = [sum(payload.size for payload in request.payloads) for request in requests]
    return [(answer, total - size) for answer, total, size in zip(answers, sent, sizes, strict=True)]


def _gather(requests: Sequence[GatherRequest], comm: Communicator, tag: int, choose: Chooser) -> Schedule:
    """Gathers around a ring. A payload is read while the next one is being received."""
    sizes = yield from _sizes(requests, comm, tag)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    blocks = {comm.rank: _joined([request.payload for request in requests])}
    following = 0
    for step in range(comm.size):
        under_way: Schedule = iter(())  # type: ignore[assignment]
        if step < comm.size - 1:
            source = (comm.rank - step - 1) % comm.size
            arriving = np.empty(sizes[source].sum(), np.uint8)
            outgoing = blocks[(comm.rank - step) % comm.size]
            under_way = exchange(comm, tag, outgoing=outgoing, destination=right, target=arriving, source=left)
        begun = next(under_way, ())
        while following in blocks:
            for request, payload in zip(requests, _cut(blocks[following], sizes[following]), strict=True):
                request.read(following, payload)
            following += 1
        yield begun
        yield from under_way
        if step < comm.size - 1:
            blocks[source] = arriving
    passed_on = sizes.sum(0) - sizes[right]
    return [(None, int(sent_bytes)) for sent_bytes in passed_on]


def _sizes(requests: Sequence[GatherRequest], comm: Communicator, tag: int) -> Schedule:
    """Returns the sizes of all ranks' payloads: a row for each rank, a column for each request."""
    sizes = np.zeros((comm.size, len(requests)), np.int64)
    unknown = [place for place, request in enumerate(requests) if request.sizes is None]
    for place, request in enumerate(requests):
        sizes[:, place] = 0 if request.sizes is None else request.sizes
    if unknown:
        gathered = np.zeros((comm.size, len(unknown)), np.int64)
        gathered[comm.rank] = [requests[place].payload.size for place in unknown]
        yield from all_gather(list(gathered))(comm, tag)
        sizes[:, unknown] = gathered
    return sizes


_COLLECTIVES: dict[type, Callable[..., Schedule]] = {
    SumRequest: functools.partial(_combined, combine=np.add),
    MaximumRequest: functools.partial(_combined, combine=np.maximum),
    ExchangeRequest: _exchange,
    GatherRequest: _gather,
}


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _cut(array: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1])


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Returns the number of bytes that a rank sends in a ring all-reduce of ``nbytes`` bytes."""
    return 2 * nbytes * (ranks - 1) // ranks
