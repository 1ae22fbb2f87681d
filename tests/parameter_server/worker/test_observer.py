"""An evaluator's session beside a worker's, over real servers."""

import contextlib
import threading

import numpy as np
import pytest

from tests.parameter_server.serving import DEADLINE, serving
from tests.parameter_server.worker.test_session import SHAPES, begin, described, first_values, model_of, ones, sessions
from tfdist.errors import TfdistError
from tfdist.parameter_server.options.synchronization import Synchronous
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.observer import Observer


@contextlib.contextmanager
def observer(running):
    over = threading.Event()
    made = Observer([Connection(server.address, "ps", DEADLINE) for server in running], model_of(len(running)), over)
    try:
        yield made, over
    finally:
        made.close()


def values_of(session, vectors):
    return session.whole(vectors)


def test_observer_waits_for_the_model_and_blocks_no_worker():
    """In steps that wait for all workers."""
    with serving(Synchronous()) as server, serving(Synchronous()) as other:
        running = [server, other]
        with sessions(Synchronous(), 1, running=running) as (worker,), observer(running) as (made, _):
            results = []
            thread = threading.Thread(target=lambda: results.append(made.begin(*described(), None)), daemon=True)
            thread.start()
            begin(0, worker)
            thread.join(DEADLINE)
            for value, first in zip(values_of(made, results[0]), first_values(), strict=True):
                np.testing.assert_array_equal(value, first)
            for _ in range(3):
                worker.step(ones(worker))
            assert (made.version, made.newest_version()) == (0, 3)
            for value, first in zip(values_of(made, made.pull()), first_values(), strict=True):
                np.testing.assert_allclose(value, first - 3, rtol=1e-5)
            assert (made.version, made.iterations) == (3, 3)
            state = made.state()
            assert [value.shape for value in state.values] == SHAPES
            assert int(state.scalars["iteration"]) == 3
            assert [reported.number for reported in worker.report().workers] == [0]
            with pytest.raises(TfdistError, match="does not train"):
                made.step(ones(made))


def test_job_end_without_a_model_raises():
    with serving() as server, observer([server]) as (made, over):
        assert made.newest_version() == 0
        over.set()
        with pytest.raises(TfdistError, match="the job is over, and the parameter servers have no model"):
            made.begin(*described(), None)
