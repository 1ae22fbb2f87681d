"""A worker whose messages reach servers that were started again, or that took it for lost."""

import contextlib

import numpy as np

from tests.parameter_server.serving import DEADLINE, serving
from tests.parameter_server.worker.test_session import begin, described, first_values, model_of, ones
from tfdist.parameter_server.protocol.state import TrainingState
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.session import Session


def test_prefetched_steps_are_repeated_after_worker_is_lost():
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving()) for _ in range(2)]
        connections = [Connection(server.address, "ps", DEADLINE) for server in servers]
        session = Session(connections, 0, model_of(), prefetch=1)
        stack.callback(session.close)
        begin(0, session)
        for lost in (False, True, False, True):
            session.step(ones(session))
            if lost:
                servers[1].lost(0)
        for value, first in zip(session.whole(session.pull()), first_values(), strict=True):
            np.testing.assert_allclose(value, first - 4, rtol=1e-5)


def test_session_attaches_again_after_worker_is_lost():
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving()) for _ in range(2)]
        connections = [Connection(server.address, "ps", DEADLINE) for server in servers]
        session = Session(connections, 0, model_of())
        stack.callback(session.close)
        begin(0, session)
        session.step(ones(session))
        servers[1].lost(0)
        values = session.whole(session.step(ones(session)))
        for value, first in zip(values, first_values(), strict=True):
            np.testing.assert_allclose(value, first - 2, rtol=1e-5)


def test_restarted_server_gets_the_chiefs_model(caplog):
    """Started again without a snapshot: what the chief read last is the newest that is left."""
    newest = []

    with contextlib.ExitStack() as stack:
        first, other = contextlib.ExitStack(), stack.enter_context(serving())
        server = first.enter_context(serving())
        connections = [Connection(endpoint.address, "ps", DEADLINE) for endpoint in (server, other)]
        session = Session(connections, 0, model_of())
        stack.callback(session.close)
        session.begin(*described(), lambda: TrainingState(newest or first_values()))
        for _ in range(3):
            newest[:] = session.whole(session.step(ones(session)))
        first.close()
        stack.enter_context(serving(address=server.address))
        values = session.whole(session.step(ones(session)))
        for value, first_value in zip(values, first_values(), strict=True):
            np.testing.assert_allclose(value, first_value - 4, rtol=1e-5)
        assert session.version == 1, "of the new server"
        assert "ps 0 was started again: at least 2 updates are lost" in caplog.text


def test_a_server_that_was_started_again_has_the_chiefs_learning_rate():
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        server = first.enter_context(serving())
        session = Session([Connection(server.address, "ps 0", DEADLINE)], 0, model_of(1))
        stack.callback(session.close)
        begin(0, session)
        session.step(ones(session), rate=0.5)
        first.close()
        stack.enter_context(serving(address=server.address))
        values = session.whole(session.step(ones(session), rate=0.5))
        for value, first_value in zip(values, first_values(), strict=True):
            np.testing.assert_allclose(value, first_value - 0.5, rtol=1e-5)


def test_session_attaches_again_if_lost_before_the_model():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        connection = Connection(server.address, "ps 0", DEADLINE)
        session = Session([connection], 0, model_of(1))
        stack.callback(session.close)
        original, answers = connection.request, []

        def request(*args, **options):
            answers.append(original(*args, **options))
            if len(answers) == 1:  # to `Attach`
                server.lost(0)
            return answers[-1]

        connection.request = request
        begin(0, session)
        assert [type(answer).__name__ for answer, _ in answers].count("Attached") == 2
        session.step(ones(session))
