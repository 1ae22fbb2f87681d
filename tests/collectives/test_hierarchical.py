import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import hierarchical

LENGTH = 16 * 15 * 14


def worlds():
    """By rank, the machine: equal and unequal machines, round-robin ranks, one machine, one process on each."""
    return [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 0, 1, 1, 2), (0, 0, 0), (0, 1, 2), (0,) * 4 + (1,) * 4]


@pytest.mark.parametrize("hosts", worlds())
@pytest.mark.parametrize("length", [0, 1, 5, 1001])
def test_sum_is_exact_and_identical(hosts, length):
    generator = np.random.default_rng(0)
    buffers = [generator.normal(size=length).astype(np.float32) for _ in hosts]
    expected = np.sum(buffers, axis=0, dtype=np.float64)
    simulate(len(hosts), lambda rank: hierarchical.all_reduce(buffers[rank]), hosts=hosts)
    for buffer in buffers:
        np.testing.assert_allclose(buffer, expected, atol=1e-5)
        assert buffer.tobytes() == buffers[0].tobytes()


@pytest.mark.parametrize("machines", [1, 2, 4])
@pytest.mark.parametrize("local", [1, 2, 4])
def test_messages_and_bytes_are_the_formulas(machines, local):
    hosts = tuple(machine for machine in range(machines) for _ in range(local))
    buffers = [np.ones(LENGTH, np.float32) for _ in hosts]
    _, communicators = simulate(len(hosts), lambda rank: hierarchical.all_reduce(buffers[rank]), hosts=hosts)
    for communicator in communicators:
        inside = 2 * LENGTH * (local - 1) // local
        across = 2 * LENGTH * (machines - 1) // (machines * local)
        assert communicator.bytes_sent == 4 * (inside + across)
        assert communicator.messages_sent == 2 * (local - 1) + 2 * (machines - 1)
