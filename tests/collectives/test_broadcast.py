import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.broadcast import broadcast


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("root", [0, 1])
def test_every_rank_gets_the_roots_buffer(size, root):
    buffers = [np.full(10, float(rank)) for rank in range(size)]
    _, communicators = simulate(size, lambda rank: broadcast(buffers[rank], root))
    for buffer in buffers:
        assert (buffer == root).all()
    assert sum(communicator.messages_sent for communicator in communicators) == size - 1
    assert max(communicator.messages_sent for communicator in communicators) == int(np.ceil(np.log2(size)))
