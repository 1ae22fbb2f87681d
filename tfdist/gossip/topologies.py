"""Topologies: which processes average weights with each other, and how much each counts.

A topology is a matrix W in each round: process i continues with Σ_j W_ij x_j. Rows and columns add up to 1, so that the
mean of all processes' weights stays constant. After some rounds every process has received something of every other.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist import whole_numbers
from tfdist.compression.method import Described


class Topology(Described, abc.ABC):
    """The lines between processes. It must be the same on all of them, which compare its ``repr``.

    Attributes:
        is_static: whether every round has the same weights, which are symmetric.
    """

    is_static = True

    @abc.abstractmethod
    def sources(self, rank: int, size: int, number: int) -> dict[int, float]:
        """Returns the weights with which a process takes others into its mean; the rest is its own weight.

        Args:
            rank: rank of the process.
            size: number of processes.
            number: number of the round, from 0.
        """

    def targets(self, rank: int, size: int, number: int) -> list[int]:
        """Returns the ranks of the processes that take this one's weights in a round.

        Args:
            rank: rank of the process.
            size: number of processes.
            number: number of the round, from 0.
        """
        return list(self.sources(rank, size, number))

    def neighbours(self, rank: int, size: int) -> dict[int, float]:
        """Returns all ranks with which a process exchanges weights in some round, with approximate average weights.

        Args:
            rank: rank of the process.
            size: number of processes.
        """
        return self.sources(rank, size, 0)

    def check(self, size: int) -> None:
        """Checks that a number of processes can use the topology.

        Args:
            size: number of processes.

        Raises:
            ValueError: the topology is for another number.
        """
        return


@dataclass(frozen=True, repr=False)
class Ring(Topology):
    """A ring: each process averages with the one before it and the one after it, all three with equal weights.

    A ring is cheap, but slow with many processes: the distance between them shrinks by about 1 − 13 / n² in a round of
    n.
    """

    def sources(self, rank: int, size: int, number: int) -> dict[int, float]:
        """Returns equal weights for both neighbours; see `Topology`."""
        others = {(rank - 1) % size, (rank + 1) % size} - {rank}
        return dict.fromkeys(sorted(others), 1 / (len(others) + 1))


@dataclass(frozen=True, repr=False)
class Complete(Topology):
    """A complete graph: each process averages with all others, and after each round all have the mean."""

    def sources(self, rank: int, size: int, number: int) -> dict[int, float]:
        """Returns equal weights for all others; see `Topology`."""
        return {other: 1 / size for other in range(size) if other != rank}


@dataclass(frozen=True, repr=False)
class ExponentialGraph(Topology):
    """A graph in which process i averages with process i − 2^(t mod ⌈log2 n⌉) in round t: one message a round.

    If n is a power of two, all have the mean after log2 n rounds without steps of training.

    References:
        Assran, Loizou, Ballas and Rabbat, *Stochastic gradient push for distributed deep learning*, ICML 2019. Ying et
            al., *Exponential graph is provably efficient for decentralized deep training*, NeurIPS 2021.
    """

    is_static = False

    def _hop(self, size: int, number: int) -> int:
        return 1 << (number % max(1, math.ceil(math.log2(size))))

    def sources(self, rank: int, size: int, number: int) -> dict[int, float]:
        """Returns the weight of the process one hop before; see `Topology`."""
        return {(rank - self._hop(size, number)) % size: 0.5} if size > 1 else {}

    def targets(self, rank: int, size: int, number: int) -> list[int]:
        """Returns the rank of the process one hop after; see `Topology`."""
        return [(rank + self._hop(size, number)) % size] if size > 1 else []

    def neighbours(self, rank: int, size: int) -> dict[int, float]:
        """Returns the processes at all hops in both directions; see `Topology`."""
        hops = {1 << number for number in range(math.ceil(math.log2(size)))} if size > 1 else set()
        others = sorted({(rank + sign * hop) % size for hop in hops for sign in (-1, 1)})
        return dict.fromkeys(others, 0.5 / max(1, len(others)))


@dataclass(frozen=True, repr=False)
class RandomPairs(Topology):
    """Pairs of processes that average, drawn anew in each round. If the number of processes is odd, one stays alone.

    Args:
        seed: seed of the draws; a number from 0.

    Raises:
        ValueError: ``seed`` is not a number from 0.
    """

    seed: int = 0
    is_static = False

    def __post_init__(self) -> None:
        whole_numbers.check("RandomPairs(seed=…)", self.seed, least=0)

    def sources(self, rank: int, size: int, number: int) -> dict[int, float]:
        """Returns the weight of the partner in a round; see `Topology`."""
        order = np.random.default_rng([self.seed, number]).permutation(size).tolist()
        place = order.index(rank)
        other = place ^ 1
        return {order[other]: 0.5} if other < size else {}

    def neighbours(self, rank: int, size: int) -> dict[int, float]:
        """Returns all other processes with equal weights; see `Topology`."""
        return {other: 0.5 / (size - 1) for other in range(size) if other != rank}


class Graph(Topology):
    """A connected graph whose neighbours average, with Metropolis-Hastings weights by their numbers of neighbours.

    Args:
        graph: a square matrix of 0 and 1, which says which processes are neighbours; a matrix of the weights W
            themselves; a mapping from each rank to the ranks of its neighbours; or a graph of ``networkx``, whose nodes
            are ranks.

    Raises:
        ValueError: ``graph`` is none of these; it is not symmetric or not connected; or weights do not add up to 1.
    """

    def __init__(self, graph: Any) -> None:
        self._weights = _weights(graph)

    def __repr__(self) -> str:
        return f"Graph({np.round(self._weights, 6).tolist()})"

    def sources(self, rank: int, size: int, number: int) -> dict[int, float]:
        """Returns the weights of the rank's neighbours; see `Topology`."""
        row = self._weights[rank].tolist()
        return {other: weight for other, weight in enumerate(row) if weight and other != rank}

    def check(self, size: int) -> None:
        """Checks that the graph has a rank for each process."""
        if len(self._weights) != size:
            raise ValueError(
                f"the topology is a graph of {len(self._weights)} processes, but {size} train: give it one rank for "
                "each process"
            )


_NAMES: dict[str, type[Topology]] = {
    "ring": Ring,
    "exponential": ExponentialGraph,
    "random": RandomPairs,
    "complete": Complete,
}


def as_topology(given: Any) -> Topology:
    """Returns the topology that a user's argument stands for.

    Args:
        given: name of a topology, a `Topology`, or what `Graph` takes.

    Raises:
        ValueError: ``given`` is none of these.
    """
    if isinstance(given, Topology):
        return given
    if isinstance(given, str):
        if given not in _NAMES:
            raise ValueError(f"topology= must be one of {', '.join(map(repr, _NAMES))}, or a graph; got {given!r}")
        return _NAMES[given]()
    return Graph(given)


def _weights(graph: Any) -> np.ndarray:
    if isinstance(graph, Mapping):
        for rank, others in graph.items():
            if isinstance(others, str) or not isinstance(others, Iterable):
                raise ValueError(f"a mapping must list the neighbours of each rank; got {others!r} for rank {rank}")
        matrix = _adjacency(graph.keys(), ((rank, other) for rank, others in graph.items() for other in others))
    elif hasattr(graph, "nodes") and hasattr(graph, "edges"):
        edges = list(graph.edges())
        matrix = _adjacency(graph.nodes(), [*edges, *((other, rank) for rank, other in edges)])
    else:
        try:
            matrix = np.asarray(graph, np.float64)
        except (TypeError, ValueError):
            matrix = np.zeros(0)
    if not matrix.ndim or not matrix.size:
        names = ", ".join(map(repr, _NAMES))
        raise ValueError(f"topology= must be one of {names}, a matrix, a mapping or a graph; got {graph!r}")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"a graph's matrix must be square, with a row for each process; got shape {matrix.shape}")
    if not (matrix >= 0).all() or not np.isfinite(matrix).all():
        raise ValueError(f"a graph's matrix must have finite numbers of at least 0; got {matrix.tolist()}")
    one_way = np.argwhere(~np.isclose(matrix, matrix.T))
    if len(one_way):
        rank, other = one_way[0].tolist()
        raise ValueError(
            f"two neighbours must give each other the same weight; got {matrix[rank, other]:g} from rank {rank} to "
            f"{other}, and {matrix[other, rank]:g} from {other} to {rank}"
        )
    if np.isin(matrix, (0, 1)).all():
        links = matrix.astype(bool) & ~np.eye(len(matrix), dtype=bool)
        degrees = links.sum(axis=1)
        matrix = links / (1 + np.maximum(degrees[:, None], degrees[None, :]))
        matrix += np.diag(1 - matrix.sum(axis=1))
    elif not np.allclose(matrix.sum(axis=1), 1):
        raise ValueError(f"each row of a matrix of weights must add up to 1; got {matrix.sum(axis=1).tolist()}")
    _check_connected(matrix)
    return matrix


def _adjacency(nodes: Iterable[Any], links: Iterable[tuple[Any, Any]]) -> np.ndarray:
    ranks = sorted(nodes)
    if ranks != list(range(len(ranks))):
        raise ValueError(f"a graph's nodes must be the ranks from 0 on, without a gap; got {ranks}")
    matrix = np.zeros([len(ranks), len(ranks)])
    for rank, other in links:
        if other not in ranks:
            raise ValueError(f"rank {rank} has the neighbour {other!r}, which is not a rank of the graph")
        matrix[rank, other] = 1
    return matrix


def _check_connected(matrix: np.ndarray) -> None:
    reached, front = {0}, [0]
    while front:
        front = [other for other in np.flatnonzero(matrix[front.pop()]).tolist() if other not in reached] + front
        reached.update(front)
    missing = sorted(set(range(len(matrix))) - reached)
    if missing:
        raise ValueError(f"the topology is not connected: no path leads from rank 0 to ranks {missing}")
    if len(matrix) > 1 and not np.diag(matrix).any() and _is_bipartite(matrix):
        raise ValueError(
            "with these weights, processes would swap their values for ever: give each process a weight for its own "
            "values"
        )


def _is_bipartite(matrix: np.ndarray) -> bool:
    """Returns whether a symmetric matrix of weights has the eigenvalue −1."""
    return bool(np.isclose(np.linalg.eigvalsh(matrix)[0], -1))
