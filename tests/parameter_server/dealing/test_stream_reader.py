"""A stream that one worker brings to all, over real sockets."""

import contextlib
import threading

import numpy as np
import pytest

from tests.parameter_server.dealing.test_epochs import Served
from tests.parameter_server.serving import DEADLINE, serving
from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.dealing.epochs import SharedEpochs
from tfdist.parameter_server.dealing.plan import Plan
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError

PLAN = Plan(None, 1, None)


@pytest.fixture
def served():
    with contextlib.ExitStack() as stack:
        yield Served(stack)


def numbers(count, opened=None):
    def stream():
        if opened is not None:
            opened.append(count)
        for number in range(count):
            yield [np.array([number]), np.array([-number])]

    return stream


def used(epochs):
    """Uses all tickets of an epoch up; returns the numbers that came with them."""
    received = []
    for ticket, (number, negative) in epochs.tickets():
        assert number[0] == -negative[0]
        received.append(int(number[0]))
        epochs.skip(ticket)
    return received


def test_each_epoch_reads_the_stream_anew(served):
    opened = []
    epochs = served.epochs(plan=PLAN, stream=numbers(20, opened))
    for epoch in range(3):
        epochs.begin(epoch)
        assert used(epochs) == list(range(20))
    assert len(opened) == 3


def test_workers_share_a_stream(served):
    first, second = served.epochs(0, PLAN, stream=numbers(30)), served.epochs(1, PLAN)
    first.begin(0)
    second.begin(0)
    second_numbers = []
    other = threading.Thread(target=lambda: second_numbers.extend(used(second)), daemon=True)
    other.start()
    first_numbers = used(first)
    other.join(DEADLINE)
    assert not other.is_alive()
    assert sorted(first_numbers + second_numbers) == list(range(30))


def test_stream_is_read_only_while_there_is_room(served):
    read = []

    def stream():
        for number in range(100):
            read.append(number)
            yield [np.array([number])]

    epochs = served.epochs(plan=PLAN, stream=stream)
    epochs.begin(0)
    for taken, (ticket, _) in enumerate(epochs.tickets()):
        epochs.skip(ticket)
        assert len(read) <= taken + 5
    assert len(read) == 100


def test_a_server_that_is_started_again_gets_the_stream_from_its_beginning():
    opened, received = [], []
    with serving(deals=DealerService()) as server:
        address = server.address
        epochs = SharedEpochs(lambda: Connection(address, "ps 0", DEADLINE), 0, 0, PLAN, stream=numbers(6, opened))
        epochs.begin(0)
        tickets = epochs.tickets()
        epochs.skip(next(tickets)[0])
    with serving(address=address, deals=DealerService()):
        for ticket, (number, _) in tickets:
            received.append(int(number[0]))
            with contextlib.suppress(MessageRefusedError):  # of a batch that the first one has dealt
                epochs.skip(ticket)
        epochs.close()
    assert received[-6:] == list(range(6))
    assert len(opened) == 2


def test_restarted_worker_continues_the_stream(served):
    first, second = served.epochs(0, PLAN, stream=numbers(8)), served.epochs(1, PLAN)
    first.begin(0)
    second.begin(0)
    tickets = second.tickets()
    received = []
    for _ in range(4):
        ticket, (number, _) = next(tickets)
        received.append(int(number[0]))
        second.skip(ticket)
    first._bringer.stop()
    served.server.lost(0)
    again = served.epochs(0, PLAN, stream=numbers(8))
    again.begin(0)
    for ticket, (number, _) in tickets:
        received.append(int(number[0]))
        second.skip(ticket)
    assert received == list(range(8))


def test_data_that_cannot_be_read_are_an_error_on_every_worker(served):
    def failing():
        yield [np.array([0])]
        raise KeyError("no such column")

    first, second = served.epochs(0, PLAN, stream=failing), served.epochs(1, PLAN)
    first.begin(0)
    second.begin(0)
    for epochs in (first, second):
        with pytest.raises(
            MessageRefusedError, match="data of the chief's fit could not be read: KeyError: 'no such column'"
        ):
            list(epochs.tickets())
        assert epochs.failure is not None


def test_closing_ends_an_endless_stream(served):
    epochs = served.epochs(plan=PLAN, stream=numbers(10**9))
    epochs.begin(0)
    next(epochs.tickets())
    thread = epochs._bringer._thread
    epochs.close()
    assert not thread.is_alive()


def test_next_epoch_discards_the_rest_of_the_stream(served):
    epochs, other = served.epochs(plan=PLAN, stream=numbers(10**9)), served.epochs(1, PLAN)
    epochs.begin(0)
    other.begin(0)
    next(epochs.tickets())
    epochs.begin(1)
    assert len(used(other)) <= 6
    assert next(epochs.tickets())[1][0][0] == 0
