"""The order in which ranks begin the library's collectives, with MPI's own messages and sums played by a fake.

Sums over several processes are in tests/multiprocess/test_collectives.py.
"""

import ml_dtypes
import numpy as np
import pytest

from tfdist.comm.library import LibraryCollectives, _operate


class Comm:
    """A stand-in for the mpi4py communicator of one of several ranks.

    Args:
        rank: rank of this process.
        mailboxes: sent messages, by rank and tag.

    Attributes:
        begun: first elements of the buffers whose all-reduces have begun, in their order.
    """

    def __init__(self, rank, mailboxes, size=2):
        self.rank, self.size, self.mailboxes, self.begun = rank, size, mailboxes, []

    def Dup(self):
        return self

    def Send(self, place, destination, tag):
        self.mailboxes[destination, tag] = place.copy()

    def Irecv(self, place, source, tag):
        assert source == 0
        return Request(lambda: self._take(place, tag))

    def _take(self, place, tag):
        if (self.rank, tag) not in self.mailboxes:
            return False
        place[...] = self.mailboxes.pop((self.rank, tag))
        return True

    def Iallreduce(self, send, receive, operator):
        buffer, count, datatype = receive
        assert buffer.nbytes == count * datatype.Get_size()
        self.begun.append(float(buffer.view(np.float32)[0]))
        return Request(lambda: True)


class Request:
    def __init__(self, test):
        self.Test = test


def order_of_the_others(first, second):
    """In which rank 1 begins what rank 0 posts in one order of tags and rank 1 in another; and what it completes."""
    mailboxes = {}
    chief, other = (LibraryCollectives(Comm(rank, mailboxes)) for rank in range(2))
    calls = {tag: other.all_reduce(np.full(3, tag, np.float32), np.add, tag) for tag in second}
    early = [call.completed() for call in calls.values()]
    before = list(other._comm.begun)
    for tag in first:
        assert chief.all_reduce(np.full(3, tag, np.float32), np.add, tag).completed()
    for _ in second:
        for call in calls.values():
            call.completed()
    return early, before, chief._comm.begun, other._comm.begun, [call.completed() for call in calls.values()]


@pytest.mark.parametrize(("first", "second"), [([1, 2, 3], [3, 1, 2]), ([5, 4], [4, 5]), ([1], [1])])
def test_all_ranks_start_calls_in_rank_0s_order(mpi, first, second):
    """Who has posted waits until it is told the place."""
    early, before, by_chief, by_other, done = mpi(order_of_the_others, first, second)
    assert (set(early), before) == ({False}, [])
    assert by_chief == by_other == first
    assert set(done) == {True}


def place_that_is_missing():
    """Rank 0 has posted 1 and 2, and rank 1 only 2."""
    mailboxes = {}
    chief, other = (LibraryCollectives(Comm(rank, mailboxes)) for rank in range(2))
    for tag in (1, 2):
        chief.all_reduce(np.full(3, tag, np.float32), np.add, tag)
    late = other.all_reduce(np.full(3, 2, np.float32), np.add, 2)
    waits = late.completed()
    first = other.all_reduce(np.full(3, 1, np.float32), np.add, 1)
    first.completed()
    return waits, late.completed(), other._comm.begun


def test_call_waits_for_earlier_calls_of_rank_0(mpi):
    waits, done, begun = mpi(place_that_is_missing)
    assert not waits
    assert done
    assert begun == [1, 2]


def native(combine, dtype):
    from mpi4py import MPI

    collectives = LibraryCollectives(MPI.COMM_SELF)
    datatype, operator = collectives._operator(combine, np.dtype(dtype))
    again = collectives._operator(combine, np.dtype(dtype))
    assert again == (datatype, operator)
    return operator in (MPI.SUM, MPI.PROD), datatype.Get_size()


@pytest.mark.parametrize(
    ("combine", "dtype", "is_native"),
    [(np.add, np.float32, True), (np.multiply, np.int64, True), (np.add, np.complex64, True),
     (np.add, np.float16, False), (np.add, ml_dtypes.bfloat16, False), (np.add, np.bool_, False),
     (np.maximum, np.float32, False), (np.minimum, np.int8, False)],
)  # fmt: skip
def test_mpi_operators_are_used_only_where_equal_to_numpy(mpi, combine, dtype, is_native):
    """Not for minima and maxima, in which MPI may drop NaN."""
    assert mpi(native, combine, dtype) == (is_native, np.dtype(dtype).itemsize)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_custom_maximum_keeps_nan_like_numpy(dtype):
    operand, both = np.array([np.nan, 1, 2]).astype(dtype), np.array([5, np.nan, 1]).astype(dtype)
    _operate(np.maximum, np.dtype(dtype))(memoryview(operand.view(np.uint8)), memoryview(both.view(np.uint8)), None)
    assert np.isnan(both[:2].astype(np.float32)).all()
    assert both[2] == 2


def test_overflow_in_custom_operator_raises_no_error():
    both = np.full(1, 60_000, np.float16)
    with np.errstate(all="raise"):
        _operate(np.add, both.dtype)(memoryview(both.copy().view(np.uint8)), memoryview(both.view(np.uint8)), None)
    assert np.isinf(both)
