"""Connections over real ZeroMQ on the loopback interface."""

import numpy as np
import pytest
import zmq

from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.quorum.links import Links
from tfdist.quorum.messages import ArrayPiece, FetchedState

SECONDS = 20.0


@pytest.fixture
def links():
    made = []

    def make(task, keys=None):
        made.append(Links(task, "127.0.0.1", keys))
        return made[-1]

    yield make
    for link in made:
        link.close()


class Holds:
    def __init__(self, *arrays):
        self.arrays = list(arrays)

    def state(self, request):
        return FetchedState(request, 4, 3, 70, (len(self.arrays), 0, 0)), self.arrays


def always():
    return True


def pieces(receiver, rounds, attempt, count):
    received = []
    with receiver.arrived:
        while len(received) < count:
            received += receiver.pieces(rounds, attempt)
            assert len(received) >= count or receiver.arrived.wait(SECONDS)
    return received


@pytest.mark.parametrize("keys", [None, Keys.of_secret(b"secret")])
def test_states_are_fetched_and_pieces_sent(links, keys):
    first, second = links(0, keys), links(1, keys)
    source = Holds(np.arange(100_000.0), np.ones(3, np.float16))
    first.offer("a", source)
    state, arrays = second.fetch(first.address, "a", SECONDS, always)
    assert (state.round, state.left, state.step) == (4, 3, 70)
    for array, expected in zip(arrays, source.arrays, strict=True):
        np.testing.assert_array_equal(array, expected)
        array += 1  # of the receiver's own
    sent = [np.full(4, place, np.float32) for place in range(3)]
    for place, array in enumerate(sent):
        second.send(first.address, ArrayPiece("a", 2, 1, "own 0", place), array)
    for place, (piece, array) in enumerate(pieces(first, "a", 2, 3)):
        assert piece == ArrayPiece("a", 2, 1, "own 0", place)
        np.testing.assert_array_equal(array, sent[place])
    assert (second.messages_sent, second.bytes_sent) == (3, 48)
    assert first.bytes_sent == sum(array.nbytes for array in source.arrays)


def test_fetch_returns_none_if_nothing_is_offered(links):
    first, second = links(0), links(1)
    assert second.fetch(first.address, "a", SECONDS, always) is None
    first.offer("a", Holds())  # which nobody keeps
    assert second.fetch(first.address, "a", SECONDS, always) is None


def test_fetch_returns_none_if_source_raises(links):
    class Fails:
        def state(self, request):
            raise ValueError("no state yet")

    first, second, source = links(0), links(1), Fails()
    first.offer("a", source)
    assert second.fetch(first.address, "a", SECONDS, always) is None


def test_fetch_ends_if_source_is_closed_or_lost_or_job_failed(links):
    first, second = links(0), links(1)
    address = first.address
    first.close()
    assert second.fetch(address, "a", 0.3, always) is None
    is_there = iter([True, True, False])
    assert second.fetch(address, "a", SECONDS, lambda: next(is_there)) is None

    def failed():
        raise TfdistError("over")

    with pytest.raises(TfdistError, match="over"):
        second.fetch(address, "a", SECONDS, failed)


def test_pieces_of_earlier_attempts_are_dropped_later_ones_kept(links):
    first, second = links(0), links(1)
    for attempt in (1, 2, 3):
        second.send(first.address, ArrayPiece("a", attempt, 1, "own 0", 0), np.zeros(1))
    assert [piece.attempt for piece, _ in pieces(first, "a", 3, 1)] == [3]
    with first.arrived:
        assert first.pieces("a", 2) == []


def test_invalid_messages_are_ignored(links):
    first, second = links(0), links(1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{first.address}")
        stranger.send_multipart([b"nonsense"])
        stranger.send_multipart([b"tfps\x04nonsense", b""])
        second.send(first.address, ArrayPiece("a", 1, 1, "own 0", 0), np.zeros(1))
        assert len(pieces(first, "a", 1, 1)) == 1


def test_connections_that_are_not_needed_are_closed(links):
    first, second, third = links(0), links(1), links(2)
    for target in (first, third):
        second.send(target.address, ArrayPiece("a", 1, 1, "own 0", 0), np.zeros(1))
        pieces(target, "a", 1, 1)
    second.keep([first.address])
    assert list(second._to) == [first.address]
    second.send(third.address, ArrayPiece("a", 1, 1, "own 0", 1), np.zeros(1))
    assert len(pieces(third, "a", 1, 1)) == 1, "and made again"


def test_unreferenced_links_stop_and_free_their_port():
    dropped = Links(0, "127.0.0.1", None)
    thread, address = dropped._thread, dropped.address
    del dropped
    thread.join(SECONDS)
    assert not thread.is_alive()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.bind(f"tcp://{address}")


def test_number_of_pieces_of_unknown_rounds_is_limited(links):
    first, second, source = links(0), links(1), Holds()
    first.offer("mine", source)
    for number in range(100):
        second.send(first.address, ArrayPiece(f"unknown {number}", 1, 1, "own 0", 0), np.zeros(1))
    second.send(first.address, ArrayPiece("mine", 1, 1, "own 0", 0), np.zeros(1))
    assert len(pieces(first, "mine", 1, 1)) == 1
    assert len(first._pieces) < 20
