"""Workers that train on dealt batches; all of them on threads, over real sockets."""

import contextlib

import numpy as np
import pytest

from tests.parameter_server.serving import DEADLINE, serving
from tests.parameter_server.worker.test_session import begin, first_values, on_all, ones, sessions
from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.dealing.epochs import AFTER_PAUSE, SharedEpochs, number_of
from tfdist.parameter_server.dealing.plan import Plan
from tfdist.parameter_server.options.synchronization import Asynchronous, BoundedStaleness, Synchronous
from tfdist.parameter_server.worker.client import Connection

BATCHES, EPOCHS = 7, 6


@contextlib.contextmanager
def sharing(mode, workers, servers=2, prefetch=0):
    """Sessions whose first server deals batches; yields them, each worker's epochs, and the servers."""
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(serving(mode, deals=None if number else DealerService())) for number in range(servers)
        ]
        made = stack.enter_context(sessions(mode, workers, servers, prefetch, running))
        epochs = []
        for worker, session in enumerate(made):
            arguments = worker, 0, Plan(BATCHES, 1, None)

            def connect():
                return Connection(running[0].address, "ps 0", DEADLINE)

            epochs.append(SharedEpochs(connect, *arguments, when_idle=session.suspend))
            stack.callback(epochs[-1].close)
        yield made, epochs, running


def train(session, epochs, after_step=lambda step: None):
    """Trains on what is dealt; returns the number of steps."""
    steps = 0
    for epoch in range(EPOCHS):
        epochs.begin(epoch)
        for ticket, _ in epochs.tickets():
            if ticket & AFTER_PAUSE:
                session.pull()
            session.step(ones(session), ticket=number_of(ticket))
            steps += 1
            after_step(steps)
        session.suspend()
    session.suspend(is_end=True)
    epochs.close()
    return steps


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("servers", [1, 3])
def test_a_push_with_a_ticket_counts_on_all_servers(servers, prefetch):
    with sharing(Asynchronous(), 1, servers, prefetch) as ((session,), (epochs,), _):
        begin(0, session)
        assert train(session, epochs) == BATCHES * EPOCHS
        values = session.whole(session.pull())
        for value, first in zip(values, first_values(), strict=True):
            np.testing.assert_allclose(value, first - BATCHES * EPOCHS, rtol=1e-5)
        assert session._versions == [BATCHES * EPOCHS] * servers


@pytest.mark.parametrize("servers", [1, 2])
def test_push_of_a_returned_batch_counts_on_no_server(servers):
    with sharing(Asynchronous(), 1, servers) as ((session,), (epochs,), _):
        begin(0, session)
        epochs.begin(0)
        ticket, _ = next(epochs.tickets())
        epochs.close()
        values = session.whole(session.step(ones(session), ticket=ticket))
        for value, first in zip(values, first_values(), strict=True):
            np.testing.assert_array_equal(value, first)
        assert (session.dealt_pushes.refusals, session._versions) == (1, [0] * servers)
        session.step(ones(session))
        assert session._versions == [1] * servers


MODES = [Asynchronous(), BoundedStaleness(0), BoundedStaleness(1), Synchronous(), Synchronous(backup_workers=1)]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("servers", [1, 2])
def test_workers_without_a_batch_block_no_other_worker(mode, servers):
    """Seven batches for three workers: in each epoch some get less than others."""
    with sharing(mode, 3, servers) as (made, epochs, _):
        on_all(made, begin)
        steps = on_all(made, lambda worker, session: train(session, epochs[worker]))
        assert sum(steps) - sum(session.dealt_pushes.refusals for session in made) == BATCHES * EPOCHS
        values = made[0].whole(made[0].pull())
        versions = made[0]._versions
        assert len(set(versions)) == 1, "all servers have made the same rounds"
        for value, first in zip(values, first_values(), strict=True):
            np.testing.assert_allclose(value, first - versions[0], rtol=1e-5)
        if not mode.in_rounds:
            assert versions[0] == BATCHES * EPOCHS


@pytest.mark.parametrize("mode", [Asynchronous(), BoundedStaleness(0), Synchronous()], ids=str)
def test_batches_of_a_worker_that_is_taken_for_lost_count_once(mode):
    """The worker lives and goes on. Each server hears of its loss at another moment."""
    with sharing(mode, 3) as (made, epochs, running):
        on_all(made, begin)

        def lose(step):
            if step in (2, 5, 9):  # a request that is lost with the worker comes again after 2 s
                running[step % 2].lost(1 + step // 3 % 2)

        steps = on_all(
            made, lambda worker, session: train(session, epochs[worker], lambda step: None if worker else lose(step))
        )
        refused = sum(session.dealt_pushes.refusals for session in made)
        assert sum(steps) - refused == BATCHES * EPOCHS
        if not mode.in_rounds:
            values = made[0].whole(made[0].pull())
            for value, first in zip(values, first_values(), strict=True):
                np.testing.assert_allclose(value, first - BATCHES * EPOCHS, rtol=1e-5)
