"""What holds for communicators of every kind."""

import inspect

import ml_dtypes
import numpy as np
import pytest

from tests.comm.communicators import finish, lending, local, of_group, over_mpi
from tfdist.comm.communicator import Communicator

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.complex128, np.int8, np.bool_]
SIZES = [0, 1, 1000, 70_000]
"""The last is lent where there are neighbours, by all dtypes that take two bytes or more."""


@pytest.fixture(params=[local, of_group, over_mpi, lending], ids=lambda make: make.__name__)
def check(request, mpi):
    """Calls a function with a communicator; where MPI runs, if that is what it needs."""

    def call(function, *arguments):
        run = mpi if request.param in (over_mpi, lending) else lambda function, *rest: function(*rest)
        return run(_with, request.param, function, *arguments)

    return call


def _with(make, function, *arguments):
    return function(make(), *arguments)


def vectors(dtype, elements):
    generator = np.random.default_rng(elements)
    return [generator.integers(0, 2, elements).astype(dtype) for _ in range(2)]


def has_all_members(communicator):
    named = {name for name in vars(Communicator) | inspect.get_annotations(Communicator) if not name.startswith("_")}
    assert named >= {"rank", "hosts", "send", "take"}
    assert [name for name in sorted(named) if not hasattr(communicator, name)] == []
    assert (communicator.rank, communicator.size, len(communicator.hosts)) == (0, 1, 1)
    for name in named:
        if callable(getattr(Communicator, name, None)):
            actual, expected = (inspect.signature(getattr(owner, name)) for owner in (communicator, Communicator))
            assert list(actual.parameters) == list(expected.parameters)[1:], name


def test_communicator_has_all_members_of_the_protocol(check):
    check(has_all_members)


def sends_whole_buffers(communicator, dtype, elements):
    given, _ = vectors(dtype, elements)
    kept, received = given.copy(), np.ones_like(given)
    finish(communicator, communicator.receive(received, 0, 3), communicator.send(given, 0, 3))
    assert received.tobytes() == given.tobytes() == kept.tobytes()
    assert (communicator.messages_sent, communicator.bytes_sent) == (1, given.nbytes)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_of_any_dtype_arrive(check, dtype, elements):
    check(sends_whole_buffers, dtype, elements)


def combines(communicator, dtype, elements, in_place):
    operand, sent = vectors(dtype, elements)
    expected = np.maximum(operand, sent)
    target = operand if in_place else np.empty_like(operand)
    kept = operand.copy()
    request = communicator.receive_combined(operand, target, np.maximum, 0, 3)
    finish(communicator, request, communicator.send(sent, 0, 3))
    assert target.tobytes() == expected.tobytes()
    assert in_place or operand.tobytes() == kept.tobytes()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8])
def test_received_elements_are_combined_with_own(check, dtype, elements, in_place):
    check(combines, dtype, elements, in_place)


def keeps_own_first(communicator, elements):
    operand, sent = np.full(elements, 5.0), np.full(elements, 3.0)
    request = communicator.receive_combined(operand, operand, np.subtract, 0, 3)
    finish(communicator, request, communicator.send(sent, 0, 3))
    assert (operand == 2).all()


@pytest.mark.parametrize("elements", [10, 70_000])
def test_the_own_operand_is_the_first(check, elements):
    check(keeps_own_first, elements)


def keeps_order(communicator, elements):
    given = [np.full(elements, float(value)) for value in range(6)]
    targets = [np.empty(elements) for _ in given]
    tags = [0, 0, 7, 0, 7, 7]
    sent = [communicator.send(buffer, 0, tag) for buffer, tag in zip(given, tags, strict=True)]
    order = [2, 4, 5, 0, 1, 3]  # the other tag first
    received = [communicator.receive(targets[place], 0, tags[place]) for place in order]
    finish(communicator, *received, *sent)
    assert [buffer[-1] for buffer in targets] == list(range(6))


@pytest.mark.parametrize("elements", [1, 70_000])
def test_transfers_of_one_tag_arrive_in_their_order(check, elements):
    check(keeps_order, elements)


def waits_for_all(communicator):
    buffers = [np.zeros(1), np.zeros(1)]
    requests = [communicator.receive(buffer, 0, tag) for tag, buffer in enumerate(buffers)]
    sent = communicator.send(np.ones(1), 0, 1)
    finish(communicator, requests[1], sent)
    assert not communicator.completed(requests)
    assert not communicator.completed(requests[:1])
    assert communicator.completed([])
    finish(communicator, *requests, communicator.send(np.ones(1), 0, 0))


def test_requests_are_completed_only_when_each_is(check):
    check(waits_for_all)


def gives_memory(communicator):
    memory = [communicator.take(nbytes) for nbytes in (0, 3, 70_000)]
    assert [(buffer.nbytes, buffer.dtype, buffer.flags.writeable) for buffer in memory] == [
        (nbytes, np.uint8, True) for nbytes in (0, 3, 70_000)
    ]
    for value, buffer in enumerate(memory):
        buffer[...] = value
    assert [set(buffer.tolist()) for buffer in memory] == [set(), {1}, {2}]


def test_taken_memory_is_writable_and_of_requested_size(check):
    check(gives_memory)
