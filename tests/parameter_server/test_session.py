"""Workers that train on several servers; all of them on threads, over real sockets."""

import contextlib
import threading

import keras
import numpy as np
import pytest

from tests.parameter_server.serving import DEADLINE, serving
from tfdist.parameter_server.client import Connection, RefusedError
from tfdist.parameter_server.session import Session
from tfdist.parameter_server.synchronization import Asynchronous, BoundedStaleness, Synchronous

SHAPES = [(1000, 200), (200,), (), (7, 3)]
"""The first is split over servers."""
PATHS = ["large", "bias", "scalar", "small"]
OPTIMIZER = keras.optimizers.serialize(keras.optimizers.SGD(1.0))


def first_values():
    generator = np.random.default_rng(0)
    return [np.asarray(generator.normal(size=shape), np.float32) for shape in SHAPES]


@contextlib.contextmanager
def sessions(mode, workers, servers=2, shapes=SHAPES):
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serving(mode)) for _ in range(servers)]
        made = []
        for worker in range(workers):
            connections = [Connection(server.address, f"ps {n}", DEADLINE) for n, server in enumerate(running)]
            made.append(Session(connections, worker, PATHS, shapes, [np.dtype(np.float32)] * 4, splits=True))
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
    return session.begin(first_values(), OPTIMIZER) if worker == 0 else session.begin(None, None)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_all_workers_begin_with_the_chiefs_values(servers):
    with sessions(Asynchronous(), 3, servers) as made:
        for values in on_all(made, begin):
            for one, other in zip(values, first_values(), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", [Asynchronous(), BoundedStaleness(1)])
def test_every_gradient_counts_once_on_every_server(mode):
    def work(worker, session):
        begin(worker, session)
        for _ in range(10):
            session.step([np.ones(shape, np.float32) for shape in SHAPES])

    with sessions(mode, 3) as made:
        on_all(made, work)
        for worker, session in enumerate(made):
            assert (session.clock, worker) == (10, worker)
        for value, first in zip(made[0].pull(), first_values(), strict=True):
            np.testing.assert_allclose(value, first - 30, rtol=1e-5)
        assert made[0].version == 30


def test_synchronous_steps_are_means():
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
    values = session.step([np.full(shape, 3.0 * worker + number, np.float32) for shape in SHAPES], worker + 1.0)
    return float(values[2])


def test_sparse_gradients_go_to_the_server_that_holds_their_rows():
    indices = np.array([0, 999, 500, 999])
    rows = np.ones((4, 200), np.float32)
    with sessions(Asynchronous(), 1) as (session,):
        begin(0, session)
        values = session.step([(rows, indices), None, None, None])
        expected = first_values()
        np.subtract.at(expected[0], indices, rows)
        for one, other in zip(values, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


def test_another_model_is_refused():
    with sessions(Asynchronous(), 1) as (session,):
        begin(0, session)
        other = Session(session._connections, 1, PATHS, [(5,), *SHAPES[1:]], [np.dtype(np.float32)] * 4, splits=True)
        with pytest.raises(RefusedError, match=r"ps \d refuses Attach: another model"):
            other.begin(None, None)


def test_leaving_servers_that_are_gone_is_no_error():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        connection = Connection(server.address, "ps 0", DEADLINE)
        session = Session([connection], 0, PATHS, SHAPES, [np.dtype(np.float32)] * 4, splits=True)
        begin(0, session)
        stack.close()
        session.close()
