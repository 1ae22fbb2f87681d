"""Workers, servers of hosts and roots on threads, over real sockets."""

import contextlib

import numpy as np
import pytest

from tests.parameter_server.hierarchy.hosting import hosting, workers_of
from tests.parameter_server.serving import DEADLINE, serving
from tests.parameter_server.worker.test_session import (
    PATHS,
    SHAPES,
    described,
    first_state,
    first_values,
    model_of,
    on_all,
    ones,
    pushed,
)
from tfdist.errors import TfdistError
from tfdist.parameter_server.hierarchy import shard as host_shard
from tfdist.parameter_server.options.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
    Synchronous,
)
from tfdist.parameter_server.protocol.messages import Attach, Inspect, Push
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError
from tfdist.parameter_server.worker.model import Model
from tfdist.parameter_server.worker.session import Session


@contextlib.contextmanager
def tree(above, within, *hosts, roots=1, begun=True, momentum=0.0):
    """Sessions of workers on hosts; each host is a tuple of workers' numbers."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serving(above, chief=10)) for _ in range(roots)]
        made, servers = {}, []
        for place, numbers in enumerate(hosts):
            servers.append(stack.enter_context(hosting(running, within, numbers, 10 + place)))
            sessions = stack.enter_context(workers_of(servers[-1], *numbers))
            made |= dict(zip(numbers, sessions, strict=True))
        sessions = [made[number] for number in sorted(made)]
        if begun:
            begin(sessions, momentum)
        yield sessions, running, servers


def begin(sessions, momentum=0.0):
    """All begin at the same time: the chief's values are for all of them."""
    description = described(momentum)
    return on_all(sessions, lambda worker, session: session.begin(*description, None if worker else first_state))


def reported(server):
    connection = Connection(server.address, "ps", DEADLINE)
    try:
        return connection.request(Inspect)[0].models[0]
    finally:
        connection.close()


def loss(session):
    """By how much the values have sunk, all alike."""
    arrays = session.whole(session.pull())
    steps = [np.mean(first - array) for first, array in zip(first_values(), arrays, strict=True)]
    np.testing.assert_allclose(steps, steps[0], rtol=1e-3)
    return round(float(steps[0]), 3)


def test_workers_begin_with_the_chiefs_values():
    with tree(Asynchronous(), SoftSync(), (0, 1), (2, 3), begun=False) as (sessions, _, _):
        for session, vectors in zip(sessions, begin(sessions), strict=True):
            for array, other in zip(session.whole(vectors), first_values(), strict=True):
                np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("roots", [1, 2])
def test_synchronous_steps_are_means_by_samples_over_all_hosts(roots):
    """Gradients 1, 2 and 6 of 3, 2 and 1 samples: their mean is 13 / 6, of which the second step is half a root's."""
    with tree(Synchronous(), Synchronous(), (0, 1), (2,), roots=roots) as (sessions, running, _):
        scales, samples = (1, 2, 6), (3, 2, 1)

        def step(worker, session):
            given = pushed(session, [np.full(shape, scales[worker], np.float32) for shape in SHAPES])
            for _ in range(2):
                vectors = session.step(given, samples[worker])
            return session.whole(vectors)

        for arrays in on_all(sessions, step):
            for array, first in zip(arrays, first_values(), strict=True):
                np.testing.assert_allclose(array, first - 2 * 13 / 6, rtol=1e-5, atol=1e-5)
        for root in running:
            report = reported(root)
            assert report.version == 2
            assert {status.number: status.counted for status in report.workers} == {10: 2, 11: 2}, (
                "one push for each host"
            )
        assert [session.version for session in sessions] == [2, 2, 2]


def test_every_asynchronous_update_counts_once():
    with tree(Asynchronous(), Asynchronous(), (0, 1), (2,)) as (sessions, running, servers):

        def steps(worker, session):
            for _ in range(10 + worker):
                session.step(ones(session))

        on_all(sessions, steps)
        assert loss(sessions[0]) == 33.0
        assert sessions[0].iterations == 33
        assert reported(running[0]).version == 33
        assert {status.number: status.counted for status in reported(servers[0]).workers} == {0: 10, 1: 11}
        assert sum(reported(running[0]).staleness.values()) == 33


def test_staleness_is_that_of_the_workers_values():
    with tree(Asynchronous(), Asynchronous(), (0, 1)) as (sessions, running, servers):
        for number in (1, 2, 3):
            arrays = sessions[1].whole(sessions[1].step(ones(sessions[1])))
            np.testing.assert_allclose(arrays[0], first_values()[0] - number, rtol=1e-5, atol=1e-5)
            assert sessions[1].version == number
        sessions[0].step(ones(sessions[0]))
        assert sessions[0].version == 4
        assert reported(running[0]).staleness == {0: 3, 3: 1}, "as old as the worker's values, not its server's"
        assert reported(servers[0]).version == 4


def test_softsync_averages_gradients_within_a_host():
    with tree(Asynchronous(), SoftSync(1), (0, 1)) as (sessions, running, _):
        sessions[0].step(ones(sessions[0]))
        assert reported(running[0]).version == 0
        sessions[0].step(ones(sessions[0]))
        assert reported(running[0]).version == 1
        assert loss(sessions[1]) == 1.0, "the mean of two"


def test_push_repeated_to_a_restarted_host_server_counts_once():
    with serving(Asynchronous()) as root:
        with hosting([root], Asynchronous(), (0, 1)) as first, workers_of(first, 0, 1) as sessions:
            begin(sessions)
            for _ in range(3):
                sessions[0].step(ones(sessions[0]))
            again = sessions[0].sender[1]
        with hosting([root], Asynchronous(), (0, 1)) as second, workers_of(second, 1) as others:
            connection = Connection(second.address, "ps 1", DEADLINE)
            connection.request(lambda id: Attach(id, 0, again, others[0]._model.name))
            others[0].begin(*described(), first_state)
            arrays = ones(others[0])[0].arrays()
            for sequence, version in ((2, 3), (3, 4)):
                push = lambda id, sequence=sequence: Push(id, 0, again, sequence, 0, 0, 1.0)  # noqa: E731
                answer, _ = connection.request(push, arrays)
                assert answer.version == version
            connection.close()
            assert loss(others[0]) == 4.0


def test_workers_continue_with_a_restarted_host_server():
    with serving(Asynchronous()) as root, contextlib.ExitStack() as stack:
        with hosting([root], Asynchronous(), (0, 1)) as first:
            sessions = stack.enter_context(workers_of(first, 0, 1))
            begin(sessions)
            on_all(sessions, lambda worker, session: session.step(ones(session)))
        with hosting([root], Asynchronous(), (0, 1), address=first.address):
            on_all(sessions, lambda worker, session: session.step(ones(session)))
            assert loss(sessions[0]) == 4.0
            assert reported(root).version == 4


@pytest.mark.parametrize("is_over", [True, False])
def test_roots_drop_a_model_that_all_hosts_left(is_over):
    with serving(Asynchronous(), chief=10) as root:
        with contextlib.ExitStack() as stack:
            hosts = [stack.enter_context(hosting([root], Asynchronous(), (n,), 10 + n)) for n in range(2)]
            sessions = [stack.enter_context(workers_of(host, n))[0] for n, host in enumerate(hosts)]
            begin(sessions)
            for session in sessions:
                session.leave(is_over)
            again = Session([Connection(hosts[0].address, "ps 1", DEADLINE)], 0, model_of(1), [model_of(1).name])
            again.begin(*described(), first_state)
            again.close()
        connection = Connection(root.address, "ps 0", DEADLINE)
        models = connection.request(Inspect)[0].models
        assert [model.occurrence for model in models] == ([1] if is_over else [0, 1])
        connection.close()


def test_other_workers_continue_after_a_worker_dies():
    with tree(Synchronous(), Synchronous(), (0, 1), (2,)) as (sessions, _, servers):
        on_all(sessions, lambda worker, session: session.step(ones(session)))
        servers[0].lost(1)
        on_all([sessions[0], sessions[2]], lambda worker, session: session.step(ones(session)))
        assert loss(sessions[0]) == 2.0
        servers[0].lost(0)
        on_all(sessions[2:], lambda worker, session: session.step(ones(session)))
        assert loss(sessions[2]) == 3.0, "no worker is left on the first host"


def test_hosts_may_make_different_numbers_of_steps():
    with tree(Synchronous(), Synchronous(), (0, 1), (2,)) as (sessions, running, _):

        def fits(worker, session):
            for steps in (3, 1) if worker < 2 else (1, 2):
                for _ in range(steps):
                    session.step(ones(session))
                session.suspend(is_end=True)

        on_all(sessions, fits)
        assert reported(running[0]).version == 5, "3 of the first call, 2 of the second"


def test_other_hosts_do_not_wait_for_suspended_workers():
    with tree(BoundedStaleness(1), Asynchronous(), (0, 1), (2,)) as (sessions, _, _):
        on_all(sessions, lambda worker, session: session.step(ones(session)) if worker else None)
        sessions[1].suspend()
        on_all(sessions[2:], lambda worker, session: [session.step(ones(session)) for _ in range(3)])
        assert loss(sessions[2]) == 5.0


def test_learning_rate_values_and_slots_pass_through_host_servers():
    with tree(Asynchronous(), Asynchronous(), (0,), (1,), momentum=0.5, roots=2) as (sessions, _, _):
        chief, other = sessions
        chief.step(ones(chief), rate=0.5)
        assert loss(other) == 0.5
        chief.put([np.zeros(shape, np.float32) for shape in SHAPES])
        state = other.state()
        assert all(not value.any() for value in state.values)
        assert [slots["momentum"].mean() for slots in state.slots] == [-0.5] * 4
        assert int(state.scalars["iteration"]) == 1
        other.step(ones(other))
        for average in other.averages():
            np.testing.assert_allclose(average, -0.75)


def test_different_model_on_another_host_raises():
    model = Model(PATHS, [(5,), *SHAPES[1:]], [np.dtype(np.float32)] * 4, 1, [True] * 4)
    with tree(Asynchronous(), Asynchronous(), (0,), (1,), begun=False) as (sessions, _, servers):
        sessions[0].begin(*described(), first_state)
        session = Session([Connection(servers[1].address, "ps 2", DEADLINE)], 1, model)
        with (
            contextlib.closing(session),
            pytest.raises(MessageRefusedError, match="root servers: another model than the chief's: variable"),
        ):
            session.begin(*described(), None)


def test_roots_that_are_gone_are_an_error_on_workers():
    with contextlib.ExitStack() as stack:
        with serving(Asynchronous()) as root:
            host = stack.enter_context(hosting([root], Asynchronous(), (0,), timeout=1.0))
            (session,) = stack.enter_context(workers_of(host, 0))
            session.begin(*described(), first_state)
        with pytest.raises(MessageRefusedError, match=r"the root servers: ps 0 at .* has not answered for 1 s"):
            session.step(ones(session))


def test_joined_push_has_staleness_of_its_oldest_gradient():
    with tree(Asynchronous(), SoftSync(1), (0, 1), (2,)) as (sessions, running, _):
        sessions[2].step(ones(sessions[2]))
        sessions[2].step(ones(sessions[2]))
        sessions[1].pull()
        assert (sessions[0].version, sessions[1].version) == (0, 2)
        sessions[0].step(ones(sessions[0]))
        sessions[1].step(ones(sessions[1]))
        assert reported(running[0]).staleness == {0: 2, 2: 1}


def test_push_counted_before_connection_failure_is_answered(monkeypatch):
    """The worker pushes it once more, to the same server, which learns from the roots that it has counted."""
    stepped = host_shard._stepped

    def counted_and_lost(*arguments):
        monkeypatch.setattr(host_shard, "_stepped", stepped)
        stepped(*arguments)
        raise TfdistError("no answer")

    with serving(Asynchronous()) as root, hosting([root], Asynchronous(), (0, 1)) as host:
        with workers_of(host, 0, 1) as sessions:
            begin(sessions)
            monkeypatch.setattr(host_shard, "_stepped", counted_and_lost)
            with pytest.raises(MessageRefusedError, match="no answer"):
                sessions[0].step(ones(sessions[0]))
            again, model = sessions[0].sender[1], sessions[0]._model.name
        with workers_of(host, 1) as (other,), contextlib.closing(Connection(host.address, "ps 1", DEADLINE)) as worker:
            other.begin(*described(), first_state)
            worker.request(lambda id: Attach(id, 0, again, model))
            push = lambda id: Push(id, 0, again, 0, 0, 0, 1.0)  # noqa: E731
            (answer,) = on_all([worker], lambda _, connection: connection.request(push, ones(other)[0].arrays())[0])
            assert answer.version == 1
