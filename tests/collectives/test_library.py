"""The plan of the library's own all-reduce; the library itself is in tests/comm/test_mpi.py."""

import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tests.comm.communicators import finish, over_mpi
from tfdist.collectives import library


def run(plan, communicator):
    schedule = plan(communicator, 3)
    waited = 0
    while True:
        try:
            requests = next(schedule)
        except StopIteration as stop:
            return stop.value, waited
        waited += len(requests)
        finish(communicator, *requests)


def sums(in_place):
    source, buffer = np.arange(5.0), np.full(5, 7.0)
    plan = library.all_reduce(source) if in_place else library.all_reduce(buffer, source=source)
    result, waited = run(plan, over_mpi())
    return result, waited, source.tolist(), buffer.tolist()


@pytest.mark.parametrize("in_place", [True, False])
def test_library_all_reduce_waits_once(mpi, in_place):
    result, waited, source, buffer = mpi(sums, in_place)
    assert (result, waited) == (None, 1)
    assert source == [0, 1, 2, 3, 4]
    assert buffer == ([7] * 5 if in_place else source)


@pytest.mark.parametrize("size", [1, 2])
def test_communicator_without_library_raises(size):
    buffers = [np.ones(3) for _ in range(size)]
    with pytest.raises(ValueError, match=r"runs among all processes of a job over MPI.*such as 'ring'"):
        simulate(size, lambda rank: library.all_reduce(buffers[rank], source=np.zeros(3)))
    assert all((buffer == 1).all() for buffer in buffers)
