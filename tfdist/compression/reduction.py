"""The sum over all ranks of a vector that is compressed: one plan for each route."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.all_gather import all_gather
from tfdist.collectives.all_to_all import all_to_all
from tfdist.collectives.schedule import Plan, Schedule, partition
from tfdist.collectives.transfer import exchange
from tfdist.comm.communicator import Communicator
from tfdist.compression import payload as payloads
from tfdist.compression.method import Linear, Method, Route, as_working, is_finite
from tfdist.compression.policy import Choice, FewerWorkers
from tfdist.compression.state import State

Chooser = Callable[[int], str]


def all_reduce(choice: Choice, vector: np.ndarray, out: np.ndarray, state: State, choose: Chooser) -> Plan:
    """Encodes a vector, and plans how to add it to those of the other ranks.

    Args:
        choice: what is done in this step; the same on all ranks.
        vector: of floating point, one-dimensional; only read.
        out: where the sum comes to lie, like ``vector``.
        state: of the tensor; its step ends here.
        choose: names the all-reduce algorithm for a vector of so many bytes, where what is sent adds up.

    Returns:
        A plan for the engine. Its result is None.
    """
    state.given_bytes += vector.nbytes
    state.plain_bytes += _plain_bytes(vector.nbytes, state.size)
    if not vector.size:
        return _nothing
    working = as_working(vector)
    if isinstance(choice, FewerWorkers):
        working = _share(working, state, choice.workers)
        choice = choice.method
    plan = _begin(choice, working, out, state, choose)
    state.step += 1
    return plan


def _nothing(comm: Communicator, tag: int) -> Schedule:
    """The sum of vectors without elements."""
    return
    yield


def _share(vector: np.ndarray, state: State, workers: int) -> np.ndarray:
    """What this rank gives where only the first ranks count."""
    workers = min(workers, state.size)
    if state.rank >= workers:
        return np.zeros_like(vector)
    return vector * vector.dtype.type(state.size / workers)


def _begin(choice: Method | None, vector: np.ndarray, out: np.ndarray, state: State, choose: Chooser) -> Plan:
    vector = _with_unsent(vector, state, choice)
    if choice is None:
        return _plain(vector, out, state, choose)
    if choice.route is Route.GATHER:
        return _gather(choice, choice.encode(vector, state), vector.dtype, out, state)
    if choice.route is Route.EXCHANGE:
        return _exchange(choice, vector, out, state)
    assert isinstance(choice, Linear)
    return _add_up(choice, vector, out, state, choose)


def _with_unsent(vector: np.ndarray, state: State, choice: Method | None) -> np.ndarray:
    """The vector, and what an earlier method of the schedule left unsent where this one does not look for it."""
    if not is_finite(vector):
        return vector
    kept = []
    if choice is None or choice.route is Route.EXCHANGE:
        kept.append((slice(None), state.arrays.pop("residual", None)))
    if (choice is None or choice.route is not Route.EXCHANGE) and state.has_parts:
        begin = 0
        for rank in range(state.size):
            residual = state.part(f"for {rank}").arrays.pop("residual", None)
            if residual is None:
                continue
            part = slice(begin, begin + residual.size)
            kept.append((part, residual))
            if rank == state.rank:
                kept.append((part, state.part("sum").arrays.pop("residual", None)))
            begin = part.stop
    unsent = [(part, array) for part, array in kept if array is not None]
    if unsent:
        vector = vector.copy()
        for part, array in unsent:
            vector[part] += array
    return vector


def _plain(vector: np.ndarray, out: np.ndarray, state: State, choose: Chooser) -> Plan:
    """As it is."""
    total = np.empty_like(vector)

    def schedule(comm: Communicator, tag: int) -> Schedule:
        yield from ALGORITHMS[choose(total.nbytes)](total, source=vector)(comm, tag)
        state.sent_bytes += _plain_bytes(total.nbytes, comm.size)
        out[...] = total

    return schedule


def _gather(method: Method, own: np.ndarray, dtype: np.dtype, out: np.ndarray, state: State) -> Plan:
    """Every rank's payload goes round the ring; each is added as soon as those of lower ranks are."""

    def schedule(comm: Communicator, tag: int) -> Schedule:
        lengths = np.zeros(comm.size, np.int64)
        lengths[comm.rank] = own.size
        yield from all_gather([lengths[rank : rank + 1] for rank in range(comm.size)])(comm, tag)
        payloads = {comm.rank: own}
        total = out if out.dtype == dtype else np.empty(out.size, dtype)
        total.fill(0)
        following = 0
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for step in range(comm.size):
            arriving = np.empty(0, np.uint8)
            if step < comm.size - 1:
                source = (comm.rank - step - 1) % comm.size
                arriving = np.empty(int(lengths[source]), np.uint8)
                outgoing = payloads[(comm.rank - step) % comm.size] if step else own
                state.sent_bytes += outgoing.size
                yield from exchange(comm, tag, outgoing=outgoing, destination=right, target=arriving, source=left)
                payloads[source] = arriving
            while following in payloads:
                method.decode(payloads[following], total, np.add)
                following += 1
        if total is not out:
            out[...] = total

    return schedule


def _exchange(method: Method, vector: np.ndarray, out: np.ndarray, state: State) -> Plan:
    """Each rank adds its part of all vectors; then all get every part's sum.

    Payloads of one method and length are equally long on all ranks, so that nobody need tell; only those of what is not
    finite are shorter, and are filled up.
    """
    dtype = vector.dtype
    parts = _parts(vector.size, state.size, method.granule(state.shape))
    encoded = [method.encode(vector[part], state.part(f"for {rank}")) for rank, part in enumerate(parts)]
    sizes = [
        payload.size if is_finite(vector[part]) else method.encode_zeros(part.stop - part.start, dtype, state).size
        for part, payload in zip(parts, encoded, strict=True)
    ]

    def schedule(comm: Communicator, tag: int) -> Schedule:
        arrived = [np.empty(sizes[comm.rank], np.uint8) for _ in parts]
        yield from all_to_all([_filled_up(one, size) for one, size in zip(encoded, sizes, strict=True)], arrived)(
            comm, tag
        )
        own = parts[comm.rank]
        given = [payloads.without_filling(payload) for payload in arrived]
        merged = method.merge(given, own.stop - own.start, dtype, state.part("sum"))
        sums = [np.empty(size, np.uint8) for size in sizes]
        sums[comm.rank] = _filled_up(merged, sizes[comm.rank])
        yield from all_gather(sums)(comm, tag)
        state.sent_bytes += sum(size for rank, size in enumerate(sizes) if rank != comm.rank)
        state.sent_bytes += sum(size for rank, size in enumerate(sizes) if rank != (comm.rank + 1) % comm.size)
        filled = [(part, payload) for part, payload in zip(parts, sums, strict=True) if part.stop > part.start]
        for part, payload in filled:
            _written(out[part], dtype, functools.partial(method.decode, payloads.without_filling(payload)))
        if any(np.isnan(out[part.start]) for part, _ in filled):
            out.fill(np.nan)  # on any other route, too, all of the tensor is, or nothing

    return schedule


def _parts(elements: int, ranks: int, granule: int) -> list[slice]:
    """A part for each rank, of whole granules but for the end."""
    granules = partition(-(-elements // granule), ranks)
    return [slice(min(part.start * granule, elements), min(part.stop * granule, elements)) for part in granules]


def _filled_up(payload: np.ndarray, size: int) -> np.ndarray:
    return payload if payload.size == size else np.pad(payload, (0, size - payload.size))


def _add_up(method: Linear, vector: np.ndarray, out: np.ndarray, state: State, choose: Chooser) -> Plan:
    """One all-reduce after the other. What is not finite shows in the first sum, on all ranks alike."""
    finite = is_finite(vector)
    rounds = method.rounds(vector if finite else np.zeros_like(vector), state)
    first = next(rounds)

    def schedule(comm: Communicator, tag: int) -> Schedule:
        given = first if finite else np.full_like(first, np.nan)
        while True:
            total = np.empty_like(given)
            yield from ALGORITHMS[choose(total.nbytes)](total, source=given)(comm, tag)
            state.sent_bytes += _plain_bytes(total.nbytes, comm.size)
            if not is_finite(total):
                rounds.close()
                out.fill(np.nan)
                return
            try:
                given = rounds.send(total)
            except StopIteration as stop:
                _written(out, vector.dtype, functools.partial(method.unpack, stop.value[0]))
                return

    return schedule


def _written(out: np.ndarray, dtype: np.dtype, write: Callable[[np.ndarray], object]) -> None:
    """Lets a vector of the working dtype be written, straight to its place if that has it."""
    if out.dtype == dtype:
        write(out)
    else:
        working = np.empty(out.size, dtype)
        write(working)
        out[...] = working


def _plain_bytes(nbytes: int, ranks: int) -> int:
    """What a rank sends in a ring all-reduce."""
    return 2 * nbytes * (ranks - 1) // ranks
