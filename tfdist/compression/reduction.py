"""The sum of a compressed vector over all ranks: the requests of a tensor on each route."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.collectives.schedule import partition
from tfdist.compression import payload as payloads
from tfdist.compression.fusion import ExchangeRequest, GatherRequest, MaximumRequest, Reduction, SumRequest
from tfdist.compression.method import Method, Route, as_working, is_finite, saturate
from tfdist.compression.payload import HEADER_BYTES
from tfdist.compression.policy import Choice, FewerWorkers
from tfdist.compression.state import State


def begin(choice: Choice, vector: np.ndarray, out: np.ndarray, state: State, momentum: float = 0.0) -> Reduction:
    """Sums a tensor over all ranks.

    Args:
        choice: the choice for this step; the same on all ranks.
        vector: floating-point, one-dimensional; only read.
        out: receives the sum; like ``vector``.
        state: the tensor's state; its step is advanced when the sum is complete.
        momentum: the momentum to apply if the method applies none.
    """
    if not vector.size:
        return
    method, working = _contribution(choice, vector, state, momentum)
    if method is None:
        state.divide([])
        out[...] = yield SumRequest(_with_unsent(working, state).astype(vector.dtype, copy=False))
    else:
        yield from reduce_on_route(best_route(method, state.size), method, working, out, state)
    state.step += 1


def begin_scattered(
    choice: Choice, vector: np.ndarray, parts: Sequence[slice], out: np.ndarray, state: State
) -> Reduction:
    """Sums a tensor over all ranks, each of which gets its part of the sum; parts travel as on `Route.EXCHANGE`.

    The sum is not encoded again. The state advances when this rank's vector is encoded, not when the sum is there: a
    tensor may be summed again before, in an order that no rank can know.

    Args:
        choice: the choice for this step; the same on all ranks. Its method has the route `Route.EXCHANGE`.
        vector: floating-point, one-dimensional; only read.
        parts: consecutive parts of the vector, one for each rank.
        out: receives this rank's part of the sum.
        state: the tensor's state.
    """
    if not vector.size:
        return
    method, working = _contribution(choice, vector, state)
    state.divide([] if method is None else parts)
    working = _with_unsent(working, state)
    if method is None:
        sent = working.astype(vector.dtype, copy=False)
        encoded = [sent[part].view(np.uint8) for part in parts]
    else:
        encoded = _encoded(method, working, state)
    # Not `state.part("sum")`, which would be in the next step if the tensor's next sum begins before this one is over.
    of_sum = State(f"{state.name}/sum", state.rank, state.size, state.seed, state.shape)
    of_sum.step = state.step
    state.step += 1
    arrived = yield ExchangeRequest(encoded)
    if method is None:
        out[...] = functools.reduce(np.add, [payload.view(vector.dtype) for payload in arrived])
        return
    given = [payloads.without_filling(payload) for payload in arrived]
    if method.votes:
        given = [method.merge(given, out.size, working.dtype, of_sum)]

    def add_up(total: np.ndarray) -> None:
        for place, payload in enumerate(given):
            method.decode(payload, total, np.add if place else None)

    _written(out, working.dtype, add_up)


def _contribution(
    choice: Choice, vector: np.ndarray, state: State, momentum: float = 0.0
) -> tuple[Method | None, np.ndarray]:
    """Returns the method for a step, and what this rank contributes; in float32 or float64."""
    working = as_working(vector)
    if isinstance(choice, FewerWorkers):
        working = _share(working, state, choice.workers)
        choice = choice.method
    if choice is None or not choice.momentum:
        working = with_momentum(working, state, momentum)
    return choice, working


def best_route(method: Method, ranks: int) -> Route:
    """Returns the method's route.

    Two ranks gather instead of exchanging: this takes as many bytes, without encoding the sum again.
    """
    return Route.GATHER if ranks == 2 and method.route is Route.EXCHANGE and not method.votes else method.route


def reduce_on_route(route: Route, method: Method, vector: np.ndarray, out: np.ndarray, state: State) -> Reduction:
    """Sums a vector of float32 or float64 on a route that the method supports; see `begin`."""
    in_parts = route is Route.EXCHANGE
    state.divide(_parts(vector.size, state.size, method.granule(state.shape)) if in_parts else [])
    if in_parts or not method.keeps_residual:
        vector = _with_unsent(vector, state)
    yield from _ROUTES[route](method, vector, out, state)


def _share(vector: np.ndarray, state: State, workers: int) -> np.ndarray:
    """Returns this rank's contribution if only the first ranks contribute."""
    workers = min(workers, state.size)
    if state.rank >= workers:
        return np.zeros_like(vector)
    return vector * vector.dtype.type(state.size / workers)


def with_momentum(vector: np.ndarray, state: State, momentum: float) -> np.ndarray:
    """Applies momentum to a vector before it is sent; momentum is linear, so it also applies to the sum.

    A vector with NaN or infinity is returned unchanged and does not update the velocity. `DeepGradientCompression` uses
    the same velocity, so that schedules may change between it and other methods.
    """
    if not momentum or not is_finite(vector):
        return vector
    velocity = state.array("velocity", vector)
    velocity *= vector.dtype.type(momentum)
    velocity += vector
    return saturate(velocity)


def _with_unsent(vector: np.ndarray, state: State) -> np.ndarray:
    """Adds the residual of the whole tensor that an earlier method of the schedule left."""
    residual = state.arrays.get("residual")
    if residual is None or not is_finite(vector):
        return vector
    del state.arrays["residual"]
    return vector + residual


def _gather(method: Method, vector: np.ndarray, out: np.ndarray, state: State) -> Reduction:
    """Sends every rank's payload to all others; each is added as soon as those of lower ranks have been."""
    total = out if out.dtype == vector.dtype else np.empty_like(vector)

    def add(rank: int, payload: np.ndarray) -> None:
        method.decode(payload, total, np.add if rank else None)

    scalers = method.scalers(vector if is_finite(vector) else np.zeros_like(vector), state)
    if scalers is not None:
        state.scalers = yield MaximumRequest(scalers)
    payload = method.encode(vector, state)
    state.scalers = None
    yield GatherRequest(payload, add)
    if total is not out:
        out[...] = total


def _exchange(method: Method, vector: np.ndarray, out: np.ndarray, state: State) -> Reduction:
    """Adds one part of all vectors on each rank; then the sums of all parts are gathered."""
    dtype, parts = vector.dtype, state.parts
    encoded = _encoded(method, vector, state)
    sizes = [payload.size for payload in encoded]
    arrived = yield ExchangeRequest(encoded)
    share = parts[state.rank]
    given = [payloads.without_filling(payload) for payload in arrived]
    merged = method.merge(given, share.stop - share.start, dtype, state.part("sum"))

    def read(rank: int, payload: np.ndarray) -> None:
        _written(out[parts[rank]], dtype, functools.partial(method.decode, payloads.without_filling(payload)))

    yield GatherRequest(_filled_up(merged, sizes[state.rank]), read, sizes)
    if any(np.isnan(out[part.start]) for part in parts if part.stop > part.start):
        out.fill(np.nan)  # as on the other routes, NaN fills the whole tensor


def _encoded(method: Method, vector: np.ndarray, state: State) -> list[np.ndarray]:
    """Returns a payload for each rank, of its part of a vector.

    Payloads of the same method and number of elements have the same size on all ranks, so sizes are not exchanged. Only
    those of vectors that are not finite are shorter, and are padded.
    """
    if not is_finite(vector):
        vector = np.full_like(vector, np.nan)  # otherwise the finite parts would count as sent
    encoded = [method.encode(vector[part], state.part(f"for {rank}")) for rank, part in enumerate(state.parts)]
    return [
        payload
        if payload.size > HEADER_BYTES
        else _filled_up(payload, method.encode_zeros(part.stop - part.start, vector.dtype, state).size)
        for part, payload in zip(state.parts, encoded, strict=True)
    ]


def _parts(elements: int, ranks: int, granule: int) -> list[slice]:
    """Returns a part for each rank, of whole granules except at the end."""
    granules = partition(-(-elements // granule), ranks)
    return [slice(min(part.start * granule, elements), min(part.stop * granule, elements)) for part in granules]


def _filled_up(payload: np.ndarray, size: int) -> np.ndarray:
    return payload if payload.size == size else np.pad(payload, (0, size - payload.size))


def _add_up(method: Method, vector: np.ndarray, out: np.ndarray, state: State) -> Reduction:
    """Runs the method's all-reduces in turn. Vectors that are not finite show in the first sum, equally on all ranks.

    A rank whose vector is not finite contributes only NaN, so every element of the sum is NaN. If only some elements
    are not finite, finite numbers have overflowed.
    """
    finite = is_finite(vector)
    rounds = method.rounds(vector if finite else np.zeros_like(vector), state)
    given = next(rounds)
    if not finite:
        given = np.full_like(given, np.nan)
    while True:
        total = yield SumRequest(given)
        if not is_finite(total):
            if np.isnan(total).all():
                rounds.close()
                out.fill(np.nan)
                return
            np.nan_to_num(total, copy=False)
        try:
            given = rounds.send(total)
        except StopIteration as stop:
            _written(out, vector.dtype, functools.partial(method.unpack, stop.value[0]))
            return


_ROUTES = {Route.GATHER: _gather, Route.EXCHANGE: _exchange, Route.ALL_REDUCE: _add_up}


def _written(out: np.ndarray, dtype: np.dtype, write: Callable[[np.ndarray], object]) -> None:
    """Calls ``write`` with an array of the working dtype: ``out`` itself if it has that dtype, else a temporary."""
    if out.dtype == dtype:
        write(out)
    else:
        working = np.empty(out.size, dtype)
        write(working)
        out[...] = working
