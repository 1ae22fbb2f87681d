"""Workers that train on several servers; all of them on threads, over real sockets."""

import contextlib
import threading

import keras
import numpy as np
import pytest

from tests.parameter_server.serving import DEADLINE, serving
from tfdist.parameter_server.options.synchronization import Asynchronous, BoundedStaleness, Synchronous
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError
from tfdist.parameter_server.worker.model import Model
from tfdist.parameter_server.worker.session import Session

SHAPES = [(1000, 200), (200,), (), (7, 3)]
"""The first is split over servers."""
PATHS = ["large", "bias", "scalar", "small"]


def model_of(servers=2, shapes=SHAPES):
    return Model(PATHS, shapes, [np.dtype(np.float32)] * 4, servers, [True] * 4)


def described(momentum=0.0):
    optimizer = keras.saving.serialize_keras_object(keras.optimizers.SGD(1.0, momentum=momentum))
    rows = [shape[0] if shape else 1 for shape in SHAPES]
    return [HeldRows(path, 0, count, count) for path, count in zip(PATHS, rows, strict=True)], optimizer


def first_state():
    return TrainingState(first_values())


def pushed(session, arrays):
    """By server, the gradients of its parts: of arrays, one for each variable."""
    model = session._model
    return [
        PushedGradients(
            ("dense",) * len(parts), shapes.layout().vectors(model.part_of(server, TrainingState(arrays)).values)
        )
        for server, (parts, shapes) in enumerate(zip(model.dealing.shards, model.shapes, strict=True))
    ]


def ones(session):
    return pushed(session, [np.ones(shape, np.float32) for shape in SHAPES])


def first_values():
    generator = np.random.default_rng(0)
    return [np.asarray(generator.normal(size=shape), np.float32) for shape in SHAPES]


@contextlib.contextmanager
def sessions(mode, workers, servers=2, prefetch=0, running=None):
    with contextlib.ExitStack() as stack:
        running = running or [stack.enter_context(serving(mode)) for _ in range(servers)]
        made = []
        for worker in range(workers):
            connections = [Connection(server.address, f"ps {n}", DEADLINE) for n, server in enumerate(running)]
            made.append(Session(connections, worker, model_of(servers), prefetch=prefetch))
        yield made
        for session in made:
            session.close()


def on_all(made, work):
    results = [None] * len(made)

    def run(worker):
        try:
            results[worker] = work(worker, made[worker])
        except Exception as error:
            results[worker] = error

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def begin(worker, session):
    return session.whole(session.begin(*described(), first_state if worker == 0 else None))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_all_workers_begin_with_the_chiefs_values(servers):
    with sessions(Asynchronous(), 3, servers) as made:
        for values in on_all(made, begin):
            for array, other in zip(values, first_values(), strict=True):
                np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("mode", [Asynchronous(), BoundedStaleness(1)])
def test_every_gradient_counts_once_on_every_server(mode):
    def work(worker, session):
        begin(worker, session)
        for _ in range(10):
            session.step(ones(session))
        session.suspend()

    with sessions(mode, 3) as made:
        on_all(made, work)
        for session in made:
            assert session.pushes == 10
            assert session.is_suspended
        for value, first in zip(made[0].whole(made[0].pull()), first_values(), strict=True):
            np.testing.assert_allclose(value, first - 30, rtol=1e-5)
        assert (made[0].version, made[0].iterations) == (30, 30)


@pytest.mark.parametrize("mode", [Asynchronous(), BoundedStaleness(1)])
def test_prefetched_step_returns_values_of_the_previous_step(mode):
    """Values are those after the step before; what reads the model waits for all."""
    with sessions(mode, 2, prefetch=1) as made:
        on_all(made[:1], begin)
        chief = made[0]
        seen = [float(chief.whole(chief.step(ones(chief)))[2]) for _ in range(4)]
        first = float(first_values()[2])
        np.testing.assert_allclose(seen, [first, first - 1, first - 2, first - 3], rtol=1e-5)
        np.testing.assert_allclose(float(chief.whole(chief.pull())[2]), first - 4, rtol=1e-5)
        made[1].begin(*described(), None)

        def work(worker, session):
            for _ in range(10):
                session.step(ones(session))
            session.suspend()

        on_all(made, work)
        np.testing.assert_allclose(float(chief.whole(chief.pull())[2]), first - 24, rtol=1e-5)


def test_synchronous_steps_average_by_samples():
    with sessions(Synchronous(), 2) as made:
        # Those that take part in the first step are those that are there by then.
        on_all(made, begin)
        results = on_all(made, lambda worker, session: [step(worker, session, number) for number in range(3)])
    first = float(first_values()[2])
    means = [(1 * (0 + number) + 2 * (3 + number)) / 3 for number in range(3)]
    expected = first - np.cumsum(means)
    for seen in results:
        np.testing.assert_allclose(seen, expected, rtol=1e-5)


def step(worker, session, number):
    arrays = [np.full(shape, 3.0 * worker + number, np.float32) for shape in SHAPES]
    return float(session.whole(session.step(pushed(session, arrays), worker + 1.0))[2])


def test_state_is_joined_from_all_servers():
    with sessions(Asynchronous(), 1) as (session,):
        session.begin(*described(momentum=0.5), first_state)
        for _ in range(2):
            session.step(ones(session))
        state = session.state()
        for value, first, slots in zip(state.values, first_values(), state.slots, strict=True):
            np.testing.assert_allclose(value, first - 2.5, rtol=1e-5)
            np.testing.assert_array_equal(slots["momentum"], np.full(value.shape, -1.5))
        assert int(state.scalars["iteration"]) == 2


def test_the_learning_rate_goes_to_all_servers_when_it_changes():
    with sessions(Asynchronous(), 1) as (session,):
        begin(0, session)
        for rate in (1.0, 0.5, 0.5):
            values = session.whole(session.step(ones(session), rate=rate))
        for value, first in zip(values, first_values(), strict=True):
            np.testing.assert_allclose(value, first - 2, rtol=1e-5)


def test_another_model_is_refused():
    with sessions(Asynchronous(), 1) as (session,):
        begin(0, session)
        other = Session(session._connections, 1, model_of(shapes=[(5,), *SHAPES[1:]]))
        why = r"another model than the chief's: variable 1 is large \[5\] float32, the chief's is large \[1000, 200\]"
        with pytest.raises(MessageRefusedError, match=why):
            other.begin(*described(), None)


def test_late_worker_gets_the_newest_of_equal_models():
    """The worker begins the first model, which the others have left for another one."""
    with sessions(Asynchronous(), 1) as (session,):
        first = Session(connections(session), 0, model_of())
        begin(0, first)
        first.close(is_over=True)
        late = Session(connections(session), 1, model_of())
        with pytest.raises(MessageRefusedError, match="all other workers have finished training"):
            late.begin(*described(), None)
        second = Session(connections(session), 0, model_of(), begun=[model_of().name])
        begin(0, second)
        second.step(ones(second))
        values = late.whole(late.begin(*described(), None))
        for value, first in zip(values, first_values(), strict=True):
            np.testing.assert_allclose(value, first - 1, rtol=1e-5)
        second.close()
        late.close()


def connections(session):
    """New ones, to the same servers."""
    return [Connection(connection._address, connection._name, DEADLINE) for connection in session._connections]


def test_leaving_servers_that_are_gone_is_no_error():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        session = Session([Connection(server.address, "ps 0", DEADLINE)], 0, model_of(1))
        begin(0, session)
        stack.close()
        session.close()
