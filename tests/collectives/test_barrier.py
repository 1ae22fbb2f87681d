import pytest

from tfdist.collectives.barrier import barrier
from tfdist.comm.local import LocalWorld


class Ranks:
    """Ranks that reach a barrier one after the other."""

    def __init__(self, size):
        world = LocalWorld(size)
        self.communicators = [world.communicator(rank) for rank in range(size)]
        self.schedules, self.waiting, self.left = {}, {}, set()

    def come(self, rank):
        self.schedules[rank] = barrier()(self.communicators[rank], 0)
        self.waiting[rank] = ()
        while self._move():
            pass

    def _move(self):
        moved = False
        for rank, requests in list(self.waiting.items()):
            if self.communicators[rank].completed(requests):
                moved = True
                try:
                    self.waiting[rank] = next(self.schedules[rank])
                except StopIteration:
                    del self.waiting[rank]
                    self.left.add(rank)
        return moved


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
def test_ranks_leave_only_after_the_last_rank_enters(size):
    for last in range(size):
        ranks = Ranks(size)
        for rank in range(size):
            if rank != last:
                ranks.come(rank)
        assert not ranks.left
        ranks.come(last)
        assert ranks.left == set(range(size))


@pytest.mark.parametrize(("size", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (16, 4), (17, 5)])
def test_one_byte_a_round(size, rounds):
    ranks = Ranks(size)
    for rank in range(size):
        ranks.come(rank)
    for communicator in ranks.communicators:
        assert (communicator.messages_sent, communicator.bytes_sent) == (rounds, rounds)
