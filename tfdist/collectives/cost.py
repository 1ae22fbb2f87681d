"""The cost of all-reduces: the α-β-γ model of every algorithm, on two levels, and the choice of the cheapest.

A message of n bytes takes α + nβ, combining n bytes takes nγ; α and β are those of the machine or those of the
network between machines. Processes of one machine that send to other machines at the same time share its link.

References:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
    Ben-Nun and Hoefler, Demystifying parallel and distributed deep learning, 2018.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tfdist.collectives.hierarchical import by_machine

Pairs = Iterable[tuple[int, int]]
"""Pairs of sender and receiver in one step."""


@dataclass(frozen=True)
class Level:
    """The cost of messages on one level.

    Attributes:
        latency: α, seconds per message.
        seconds_per_byte: β, seconds per byte.
    """

    latency: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Calibration:
    """The measured speed of a job's machines.

    Attributes:
        host: messages between processes of one machine.
        network: messages between machines.
        combine_seconds_per_byte: γ, while all processes combine.
        call_seconds: the overhead of each collective before its first message, in seconds.
    """

    host: Level
    network: Level
    combine_seconds_per_byte: float
    call_seconds: float


TYPICAL = Calibration(Level(10e-6, 1 / 5e9), Level(60e-6, 1 / 1.2e9), 1 / 8e9, 20e-6)
"""Shared memory and 10 Gbit/s Ethernet: the figures of ``"auto"`` without a calibration by `tfdist bench`."""


@dataclass(frozen=True)
class CostModel:
    """The cost model of a set of ranks.

    Attributes:
        hosts: by rank, the number of its machine.
        calibration: the costs of messages and additions.
    """

    hosts: tuple[int, ...]
    calibration: Calibration

    def seconds(self, algorithm: str, nbytes: int) -> float:
        """Returns the seconds that an all-reduce of ``nbytes`` bytes takes."""
        return self.calibration.call_seconds + _MODELS[algorithm](self, nbytes)

    def bound(self, nbytes: int) -> float:
        """Returns a lower bound in seconds for all algorithms: every link, or every process, moves its least bytes."""
        size, machines = len(self.hosts), len(set(self.hosts))
        local = min(map(self.hosts.count, self.hosts))
        inside = 2 * nbytes * (size - 1) / size * self.calibration.host.seconds_per_byte
        between = 2 * nbytes * (machines - 1) / machines * self.calibration.network.seconds_per_byte
        latency = self.calibration.network.latency * math.ceil(math.log2(machines))
        latency += self.calibration.host.latency * math.ceil(math.log2(local))
        return max(inside, between) + latency

    def step(self, pairs: Pairs, nbytes: float, combined: bool = False) -> float:
        """Returns the seconds for all pairs to transfer ``nbytes`` bytes each, and to combine them if ``combined``."""
        pairs = list(pairs)
        crossing = [self.hosts[source] for source, target in pairs if self.hosts[source] != self.hosts[target]]
        adding = nbytes * self.calibration.combine_seconds_per_byte if combined else 0.0
        if not pairs:
            return 0.0
        if crossing:
            sharing = max(map(crossing.count, set(crossing)))
            return self.calibration.network.latency + sharing * nbytes * self._between + adding
        return self.calibration.host.latency + nbytes * self.calibration.host.seconds_per_byte + adding

    @property
    def _between(self) -> float:
        return self.calibration.network.seconds_per_byte


def cheapest(hosts: tuple[int, ...], nbytes: int, calibration: Calibration) -> str:
    """Returns the algorithm with the shortest predicted time.

    Args:
        hosts: by rank, the number of its machine.
        nbytes: the vector's size in bytes.
        calibration: the speed of the machines.
    """
    return _cheapest(hosts, 1 << max(0, nbytes - 1).bit_length(), calibration)


@functools.lru_cache(maxsize=4096)
def _cheapest(hosts: tuple[int, ...], nbytes: int, calibration: Calibration) -> str:
    model = CostModel(hosts, calibration)
    candidates = [name for name in _MODELS if name != "hierarchical" or 1 < len(set(hosts)) < len(hosts)]
    return min(candidates, key=lambda name: model.seconds(name, nbytes))


def _ring(model: CostModel, nbytes: int, ranks: list[int] | None = None) -> float:
    ranks = list(range(len(model.hosts))) if ranks is None else ranks
    size = len(ranks)
    pairs = [(ranks[place], ranks[(place + 1) % size]) for place in range(size)] if size > 1 else []
    return (size - 1) * (model.step(pairs, nbytes / size, combined=True) + model.step(pairs, nbytes / size))


def _naive(model: CostModel, nbytes: int) -> float:
    size = len(model.hosts)
    pairs = [(rank, (rank + 1) % size) for rank in range(size)]
    return (size - 1) * model.step(pairs, nbytes, combined=True)


def _tree(model: CostModel, nbytes: int) -> float:
    size = len(model.hosts)
    seconds, reach = 0.0, 1
    while reach < size:
        up = [(rank, rank - reach) for rank in range(reach, size, 2 * reach)]
        down = [(rank, rank + reach) for rank in range(min(reach, size - reach))]
        seconds += model.step(up, nbytes, combined=True) + model.step(down, nbytes)
        reach *= 2
    return seconds


def _butterfly(model: CostModel, nbytes: int) -> float:
    return _folded(model, nbytes, lambda pairs, _: model.step(pairs, nbytes, combined=True))


def _reduce_scatter_gather(model: CostModel, nbytes: int) -> float:
    def step(pairs: Pairs, distance: int) -> float:
        # Among 2^k ranks, partners at a distance of d exchange d / 2^k of the vector, in both phases.
        part = nbytes * distance / (1 << (len(model.hosts).bit_length() - 1))
        return model.step(pairs, part, combined=True) + model.step(pairs, part)

    return _folded(model, nbytes, step)


def _folded(model: CostModel, nbytes: int, step: Callable[[Pairs, int], float]) -> float:
    """Returns the seconds of an algorithm that `tfdist.collectives.powers_of_two.folded` runs."""
    size = 1 << (len(model.hosts).bit_length() - 1)
    extra = len(model.hosts) - size
    rank_of = [2 * place + 1 if place < extra else place + extra for place in range(size)]
    outer = [(2 * pair, 2 * pair + 1) for pair in range(extra)]
    seconds = model.step(outer, nbytes, combined=True) + model.step([(b, a) for a, b in outer], nbytes)
    distance = 1
    while distance < size:
        seconds += step([(rank_of[place], rank_of[place ^ distance]) for place in range(size)], distance)
        distance *= 2
    return seconds


def _hierarchical(model: CostModel, nbytes: int) -> float:
    machines = by_machine(model.hosts)
    lanes = min(map(len, machines))
    inside = max(_ring(model, nbytes, ranks) for ranks in machines)
    if len(machines) == 1:
        return inside
    lines = [(ranks[lane], following[lane]) for lane in range(lanes) for ranks, following in _neighbours(machines)]
    part = nbytes / lanes / len(machines)
    return inside + (len(machines) - 1) * (model.step(lines, part, combined=True) + model.step(lines, part))


def _neighbours(machines: list[list[int]]) -> Iterable[tuple[list[int], list[int]]]:
    return zip(machines, machines[1:] + machines[:1], strict=True)


_MODELS: dict[str, Callable[[CostModel, int], float]] = {  # of equally fast algorithms, the first is chosen
    "ring": _ring,
    "butterfly": _butterfly,
    "reduce_scatter_gather": _reduce_scatter_gather,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "naive": _naive,
}
