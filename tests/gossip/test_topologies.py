import numpy as np
import pytest

from tfdist.gossip.topologies import Complete, ExponentialGraph, Graph, RandomPairs, Ring, as_topology


def matrix(topology, size, number=0):
    weights = np.zeros([size, size])
    for rank in range(size):
        for other, weight in topology.sources(rank, size, number).items():
            weights[rank, other] = weight
    return weights + np.diag(1 - weights.sum(axis=1))


TOPOLOGIES = (Ring(), Complete(), ExponentialGraph(), RandomPairs(3))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
@pytest.mark.parametrize("size", range(1, 10))
def test_mixing_matrices_keep_means_and_connect_all_ranks(topology, size):
    everything = np.eye(size)
    for number in range(12 * size):
        weights = matrix(topology, size, number)
        assert (weights >= 0).all()
        np.testing.assert_allclose(weights.sum(axis=0), 1)
        for rank in range(size):
            sources = topology.sources(rank, size, number)
            assert rank not in sources
            assert sources.keys() <= topology.neighbours(rank, size).keys()
            taking = [other for other in range(size) if rank in topology.sources(other, size, number)]
            assert sorted(topology.targets(rank, size, number)) == taking
            for other in topology.neighbours(rank, size):
                assert rank in topology.neighbours(other, size), "both hear when the other one has ended"
        if topology.is_static:
            np.testing.assert_array_equal(weights, matrix(topology, size))
            np.testing.assert_array_equal(weights, weights.T)
        everything = weights @ everything
    np.testing.assert_allclose(everything, 1 / size, atol=0.02)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_exponential_is_exact_after_few_rounds(size):
    everything = np.eye(size)
    for number in range(size.bit_length() - 1):
        everything = matrix(ExponentialGraph(), size, number) @ everything
    np.testing.assert_allclose(everything, 1 / size)


def test_random_pairs_are_drawn_anew():
    drawn = {tuple(matrix(RandomPairs(), 6, number).reshape(-1)) for number in range(20)}
    assert len(drawn) > 5
    assert (matrix(RandomPairs(1), 6) != matrix(RandomPairs(2), 6)).any() or (
        matrix(RandomPairs(1), 6, 1) != matrix(RandomPairs(2), 6, 1)
    ).any()


def test_graphs_get_the_weights_of_metropolis_and_hastings():
    star = [[0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    expected = np.array([[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]) / 4
    np.testing.assert_allclose(matrix(Graph(star), 4), expected)
    np.testing.assert_allclose(matrix(Graph({0: [1, 2, 3], 1: [0], 2: [0], 3: [0]}), 4), expected)

    class OfNetworkx:
        def nodes(self):
            return [3, 2, 1, 0]

        def edges(self):
            return [(0, 1), (2, 0), (0, 3)]

    np.testing.assert_allclose(matrix(Graph(OfNetworkx()), 4), expected)
    np.testing.assert_allclose(matrix(Graph(expected), 4), expected)
    assert repr(Graph(star)) == repr(Graph(expected))


def test_topologies_are_made_from_names():
    assert [as_topology(name) for name in ("ring", "complete", "exponential")] == [
        Ring(),
        Complete(),
        ExponentialGraph(),
    ]
    assert as_topology("random").seed == 0
    ring = Ring()
    assert as_topology(ring) is ring


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("star", "one of 'ring', 'exponential', 'random', 'complete', or a graph; got 'star'"),
        (5, "'complete', a matrix, a mapping or a graph; got 5"),
        (None, "a matrix, a mapping or a graph; got None"),
        (object(), "a matrix, a mapping or a graph; got <object"),
        ([[0, 1], [1]], "a matrix, a mapping or a graph"),
        ({0: 1, 1: 0}, "must list the neighbours of each rank; got 1 for rank 0"),
        ([[np.nan, 1], [1, 0]], "finite numbers of at least 0; got .*nan"),
        ([[0, 1, 0], [1, 0, 0]], r"got shape \(2, 3\)"),
        ([[0, 1], [0, 0]], "got 1 from rank 0 to 1, and 0 from 1 to 0"),
        ({0: [1], 1: []}, "got 1 from rank 0 to 1, and 0 from 1 to 0"),
        ([[1.5, -0.5], [-0.5, 1.5]], "finite numbers of at least 0; got"),
        ([[0.5, 0.2], [0.2, 0.5]], r"must add up to 1; got \[0.7, 0.7\]"),
        ([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]], r"from rank 0 to ranks \[2, 3\]"),
        ({0: [1], 1: [0], 2: []}, r"not connected: no path leads from rank 0 to ranks \[2\]"),
        ({0: [2], 2: [0]}, r"without a gap; got \[0, 2\]"),
        ({0: [1]}, "rank 0 has the neighbour 1, which is not a rank"),
        ([[0.0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5], [0.5, 0, 0, 0.5], [0, 0.5, 0.5, 0]], "swap their values for ever"),
    ],
)
def test_invalid_topologies_raise(given, message):
    with pytest.raises(ValueError, match=message):
        as_topology(given)


@pytest.mark.parametrize("seed", ["a", -1, 1.5, True])
def test_invalid_seeds_raise(seed):
    with pytest.raises(ValueError, match="a whole number of at least 0; got"):
        RandomPairs(seed)


def test_graph_of_another_size_raises():
    with pytest.raises(ValueError, match="a graph of 2 processes, but 3 train"):
        Graph([[0, 1], [1, 0]]).check(3)
    Ring().check(7)
