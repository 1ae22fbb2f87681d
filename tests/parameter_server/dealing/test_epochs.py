"""Workers that read dealt batches, over real sockets."""

import contextlib
import threading

import numpy as np
import pytest

from tests.parameter_server.serving import DEADLINE, serving
from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.dealing.epochs import AFTER_PAUSE, SharedEpochs, number_of
from tfdist.parameter_server.dealing.plan import Plan
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError

PLAN = Plan(10, 4, None)


class Served:
    def __init__(self, stack):
        self.deals = DealerService()
        self.server = stack.enter_context(serving(deals=self.deals))
        self._stack = stack

    def epochs(self, worker=0, plan=PLAN, fit=0, **options):
        made = SharedEpochs(lambda: Connection(self.server.address, "ps 0", DEADLINE), worker, fit, plan, **options)
        self._stack.callback(made.close)
        return made


@pytest.fixture
def served():
    with contextlib.ExitStack() as stack:
        yield Served(stack)


class Reading:
    """Reads tickets on a thread of its own, and uses them up."""

    def __init__(self, epochs):
        self.found, self.failure, self._epochs = [], None, epochs
        self._thread = threading.Thread(target=self._read, args=(epochs.tickets(),), daemon=True)
        self._thread.start()

    def _read(self, tickets):
        try:
            for ticket, indices in tickets:
                self.found.append((ticket, indices))
                self._epochs.skip(ticket)
        except Exception as error:
            self.failure = error

    def join(self):
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        return self.found


def test_tickets_cover_each_epoch_in_order(served):
    epochs = served.epochs()
    assert list(epochs.tickets()) == [], "none has begun"
    for epoch in range(2):
        epochs.begin(epoch)
        seen = []
        for ticket, indices in epochs.tickets():
            assert number_of(ticket) == ticket
            seen += indices.tolist()
            epochs.skip(ticket)
        assert seen == list(range(10))


def test_all_workers_use_the_first_workers_order(served):
    first, second = served.epochs(0, Plan(10, 4, 1)), served.epochs(1, Plan(10, 4, 2))
    first.begin(0)
    second.begin(0)
    tickets = [first.tickets(), second.tickets(), first.tickets()]
    seen = np.concatenate([next(iterator)[1] for iterator in tickets])
    assert sorted(seen) == list(range(10))


def test_different_data_raise(served):
    first, second = served.epochs(0), served.epochs(1, Plan(11, 4, None))
    first.begin(0)
    with pytest.raises(MessageRefusedError, match="all workers must train on the same data"):
        second.begin(0)


def test_waiting_worker_is_notified_and_marks_its_next_ticket(served):
    told = threading.Event()
    first, second = served.epochs(0, Plan(4, 4, None)), served.epochs(1, Plan(4, 4, None), when_idle=told.set)
    first.begin(0)
    second.begin(0)
    held, _ = next(first.tickets())
    reading = Reading(second)
    assert told.wait(DEADLINE)
    first.close()
    ((ticket, indices),) = reading.join()
    assert ticket & AFTER_PAUSE
    assert number_of(ticket) != held
    assert indices.tolist() == [0, 1, 2, 3]


def test_closing_ends_a_thread_that_waits(served):
    told = threading.Event()
    first, second = served.epochs(0, Plan(4, 4, None)), served.epochs(1, Plan(4, 4, None), when_idle=told.set)
    first.begin(0)
    second.begin(0)
    next(first.tickets())
    reading = Reading(second)
    assert told.wait(DEADLINE)
    second.close()
    assert reading.join() == []
    assert reading.failure is None


def test_worker_considered_lost_gets_its_batches_again(served):
    epochs = served.epochs()
    epochs.begin(0)
    next(epochs.tickets())
    served.server.lost(0)
    batches = Reading(epochs).join()
    assert sorted(np.concatenate([indices for _, indices in batches])) == list(range(10))


def test_a_server_that_does_not_answer_is_an_error():
    with contextlib.ExitStack() as stack:
        with serving(deals=DealerService()) as server:
            epochs = SharedEpochs(lambda: Connection(server.address, "ps 0", 1.0), 0, 0, PLAN)
            stack.callback(epochs.close)
            epochs.begin(0)
        reading = Reading(epochs)
        reading.join()
        assert reading.failure is not None
        assert epochs.failure is reading.failure


def test_server_without_a_dealer_raises():
    with serving() as server, contextlib.ExitStack() as stack:
        epochs = SharedEpochs(lambda: Connection(server.address, "ps 1", DEADLINE), 0, 0, PLAN)
        stack.callback(epochs.close)
        with pytest.raises(MessageRefusedError, match="deals no batches"):
            epochs.begin(0)
