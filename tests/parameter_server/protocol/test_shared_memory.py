"""Arrays in shared memory: the segment, and pushes over a real server."""

import contextlib
import os

import numpy as np
import pytest

from tests.parameter_server.serving import DEADLINE, attach, serving
from tests.parameter_server.worker.test_session import begin, first_values, model_of, ones
from tfdist.parameter_server.options.synchronization import Asynchronous, SoftSync, Synchronous
from tfdist.parameter_server.protocol import shared_memory
from tfdist.parameter_server.protocol.anonymous_memory import MemoryLocation
from tfdist.parameter_server.protocol.messages import LeaveModel, OfferSegment, Pull
from tfdist.parameter_server.protocol.shared_memory import Locator, Segment, locator_of
from tfdist.parameter_server.protocol.wire import InvalidMessageError
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError
from tfdist.parameter_server.worker.session import Session

AREA = 1 << 20

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@pytest.fixture
def pair():
    """A segment as its maker and another process see it."""
    made, where = Segment.make(AREA, 2)
    assert Segment.open(where, AREA, 1) is Segment.open(where, AREA, 0) is None, "it has another size"
    opened = Segment.open(where, AREA, 2)
    where.close()
    assert Segment.open(where, AREA, 2) is None
    return made, opened


def arrays(seed):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 255, size, np.uint8) for size in (300_001, 0, 77)]


def test_arrays_are_restored_from_the_locator(pair):
    made, opened = pair
    sent = []
    for slot in (0, 1):
        for is_answer in (False, True):
            given = arrays(2 * slot + is_answer)
            frames = made.moved(slot, [b"header", *given], is_answer, number=5)
            assert len(frames) == 2
            sent.append((locator_of(frames), is_answer, given))
    for locator, is_answer, given in sent:
        header, *restored = opened.restored(locator, b"header", is_answer)
        assert header == b"header"
        assert locator.id == 5
        for array, other in zip(restored, given, strict=True):
            np.testing.assert_array_equal(np.frombuffer(array, np.uint8), other)
            assert array.readonly


@pytest.mark.parametrize("size", [100, AREA + 1])
def test_small_and_oversized_arrays_stay_in_frames(pair, size):
    frames = [b"header", np.zeros(size, np.uint8)]
    assert pair[0].moved(0, frames, is_answer=False)[1] is frames[1]


def test_locators_of_other_segments_are_refused(pair):
    for locator in (Locator(1, 2, (8,)), Locator(1, -1, (8,)), Locator(1, 0, (AREA, 1))):
        with pytest.raises(InvalidMessageError, match="belongs to another segment"):
            pair[1].restored(locator, b"", is_answer=False)
    for wrong in (b"\xc1", b"\x93\x01\x00\x91\xff", b"\x91\x01"):
        with pytest.raises(InvalidMessageError, match="locator"):
            locator_of([b"tfsm" + wrong, b""])
    assert locator_of([b"tfps", b""]) is None
    assert locator_of([b"tfsm"]) is None


def test_too_large_segment_is_none():
    assert Segment.make(1 << 60, 1) is None
    assert Segment.make(1 << 70, 1) is None


def sessions(stack, servers, mode, workers=1, prefetch=0):
    made = []
    for worker in range(workers):
        connections = [Connection(server.address, "ps", DEADLINE) for server in servers]
        made.append(Session(connections, worker, model_of(len(servers)), prefetch=prefetch))
        stack.callback(made[-1].close)
        begin(worker, made[-1])
        assert None not in [connection._segment for connection in connections]
    return made


@pytest.fixture
def stack(monkeypatch):
    """Small arrays are in the segment, too."""
    monkeypatch.setattr(shared_memory, "LEAST_BYTES", 1)
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("prefetch", [0, 1])
def test_pushes_and_pulls_through_shared_memory_update_values(stack, prefetch):
    servers = [stack.enter_context(serving()) for _ in range(2)]
    (session,) = sessions(stack, servers, Asynchronous(), prefetch=prefetch)
    seen = [session.step(ones(session)) for _ in range(4)]
    assert len({session.whole(vectors)[0].tobytes() for vectors in seen[-2:]}) == (1 if prefetch == 0 else 2)
    for value, first in zip(session.whole(session.pull()), first_values(), strict=True):
        np.testing.assert_allclose(value, first - 4, rtol=1e-5)


def test_waiting_gradients_are_copied_out_of_the_segment(stack):
    """The first worker goes on, and pushes another one into the same memory, before the mean is made."""
    server = stack.enter_context(serving(SoftSync(1)))
    session, other = sessions(stack, [server], SoftSync(1), workers=2)
    session.step(ones(session))
    session._connections[0]._segment._memory[: session._model.area(0)] = bytes(session._model.area(0))
    other.step(ones(other))
    for value, first in zip(other.whole(other.pull()), first_values(), strict=True):
        np.testing.assert_allclose(value, first - 1, rtol=1e-5)


def test_a_push_that_comes_again_is_answered_in_frames(stack):
    """Its worker may be reading the answer to the first copy."""
    server = stack.enter_context(serving())
    (session,) = sessions(stack, [server], Asynchronous())
    (connection,) = session._connections
    original = connection.send

    def send(make, arrays=()):
        request = original(make, arrays)
        connection._post(request)
        return request

    connection.send = send
    kept = [vector.copy() for vector in session.step(ones(session))[0]]
    segment = connection._segment
    segment._memory[segment.area :] = bytes(segment.area)
    values = session.whole(session.pull())
    assert any(vector.any() for vector in kept)
    assert not np.frombuffer(segment._memory[segment.area :], np.uint8).any(), "the second answer is not in it"
    for value, first in zip(values, first_values(), strict=True):
        np.testing.assert_allclose(value, first - 1, rtol=1e-5)


def test_restarted_server_gets_a_new_segment(stack):
    first = contextlib.ExitStack()
    server = first.enter_context(serving())
    (session,) = sessions(stack, [server], Asynchronous())
    session.step(ones(session))
    first.close()
    again = stack.enter_context(serving(address=server.address))
    values = session.whole(session.step(ones(session)))
    assert session._connections[0]._segment is not None
    assert len(again._segments) == 1
    for value, first_value in zip(values, first_values(), strict=True):
        np.testing.assert_allclose(value, first_value - 1, rtol=1e-5)


def test_segments_are_released_when_workers_leave_or_die(stack):
    server = stack.enter_context(serving(Synchronous()))
    connections = [Connection(server.address, "ps", DEADLINE) for _ in range(2)]
    for worker, connection in enumerate(connections):
        stack.callback(connection.close)
        attach(connection, worker)
        assert connection.share(worker, AREA, 1)
    assert len(server._segments) == 2
    connections[0].request(lambda id: LeaveModel(id, 0, 1))
    server.lost(1)
    with pytest.raises(MessageRefusedError):
        connections[0].request(lambda id: Pull(id, 0, 1))
    assert not server._segments


def test_memory_that_cannot_be_mapped_is_refused(stack):
    server = stack.enter_context(serving())
    connection = Connection(server.address, "ps", DEADLINE)
    stack.callback(connection.close)
    for where in (MemoryLocation(os.getpid(), 1, b"0" * 16), MemoryLocation(-1, -1, b"")):
        with pytest.raises(MessageRefusedError, match="cannot be mapped"):
            connection.request(lambda id, where=where: OfferSegment(id, 0, where, AREA, 1))
    assert not connection.share(0, 1 << 60, 1)
    assert connection._segment is None
