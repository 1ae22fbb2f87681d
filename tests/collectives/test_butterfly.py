import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import butterfly

POWERS = [1, 2, 4, 8, 16]


def lower(first, second, out):
    """Associative, not commutative: the first of all in the order of combination."""
    np.copyto(out, first)
    return out


def upper(first, second, out):
    np.copyto(out, second)
    return out


@pytest.mark.parametrize("size", POWERS)
@pytest.mark.parametrize("in_place", [True, False])
def test_vectors_are_combined_in_the_order_of_the_ranks(size, in_place):
    for combine, expected in ((lower, 0.0), (upper, size - 1.0)):
        given = [np.full(5, float(rank)) for rank in range(size)]
        results = given if in_place else [np.full(5, np.nan) for _ in range(size)]

        def plan(rank, combine=combine, given=given, results=results):
            return butterfly.all_reduce(results[rank], combine, None if in_place else given[rank])

        simulate(size, plan)
        np.testing.assert_array_equal(results, expected)


@pytest.mark.parametrize("size", POWERS)
def test_no_operand_is_overwritten_by_its_combination(size):
    """NumPy uses other instructions in place, and the last bit could differ between ranks."""
    calls = []

    def add(first, second, out):
        calls.append(np.shares_memory(out, first) or np.shares_memory(out, second))
        return np.add(first, second, out=out)

    buffers = [np.full(5, 1.0) for _ in range(size)]
    simulate(size, lambda rank: butterfly.all_reduce(buffers[rank], add))
    assert calls == [False] * (size * (size.bit_length() - 1))
    np.testing.assert_array_equal(buffers, size)


@pytest.mark.parametrize("size", POWERS)
def test_partners_are_twice_as_far_in_each_step(size):
    partners = [[] for _ in range(size)]

    def recorded(rank):
        plan = butterfly.all_reduce(np.ones(4))

        def schedule(comm, tag):
            send = comm.send

            def record(buffer, destination, tag):
                partners[rank].append(destination)
                return send(buffer, destination, tag)

            comm.send = record
            return plan(comm, tag)

        return schedule

    simulate(size, recorded)
    distances = [1 << step for step in range(size.bit_length() - 1)]
    assert partners == [[rank ^ distance for distance in distances] for rank in range(size)]


@pytest.mark.parametrize("size", [3, 5, 6, 7, 13])
def test_extra_ranks_send_and_receive_one_vector(size):
    """Each rank beyond the power of two sends its vector once and receives the result once."""
    buffers = [np.full(6, 1.0) for _ in range(size)]
    _, communicators = simulate(size, lambda rank: butterfly.all_reduce(buffers[rank]))
    power = 1 << (size.bit_length() - 1)
    messages = sum(communicator.messages_sent for communicator in communicators)
    assert messages == power * (power.bit_length() - 1) + 2 * (size - power)
    np.testing.assert_array_equal(buffers, size)
