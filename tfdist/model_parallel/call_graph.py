"""The graph of a model's calls with their costs: work, depth and branches. The module does not depend on Keras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One call of a layer or an operation, for one batch.

    Attributes:
        name: name of the layer; later calls of the same layer have their number after it.
        kind: class name of the layer.
        inputs: indices of the calls whose outputs this call takes; empty if it takes only the model's inputs.
        flops: floating-point operations of the forward pass.
        parameters: number of the layer's parameters at its first call; 0 at later calls.
        activations: bytes of the call's outputs.
        device: device that a `tfdist.device_scope` asked for; None without one.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    flops: int
    parameters: int
    activations: int
    device: str | None = None


@dataclass(frozen=True)
class Branches:
    """Parts of a graph that do not depend on each other, from their common begin to the call where they meet.

    Attributes:
        begin: name of the call after which the branches begin; None for the model's inputs.
        end: name of the call where the branches meet.
        parts: names of the calls of each branch.
        flops: floating-point operations of each branch.
    """

    begin: str | None
    end: str
    parts: tuple[tuple[str, ...], ...]
    flops: tuple[int, ...]

    @property
    def gain(self) -> int:
        """Floating-point operations that take no time of their own if each branch has its own device."""
        return sum(self.flops) - max(self.flops)


class CallGraph:
    """The calls of a model as a directed graph.

    Args:
        calls: calls in an order in which they can run.

    Attributes:
        calls: as given.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)

    @property
    def work(self) -> int:
        """Work W: all floating-point operations."""
        return sum(call.flops for call in self.calls)

    @property
    def depth(self) -> int:
        """Depth D: the floating-point operations on the critical path, which more devices do not speed up."""
        return sum(self.calls[place].flops for place in self._longest_path())

    @property
    def parallelism(self) -> float:
        """W / D: the largest speedup that running calls side by side can give, on any number of devices."""
        return self.work / self.depth if self.depth else 1.0

    @property
    def critical_path(self) -> tuple[str, ...]:
        """Names of the calls on the most costly path."""
        return tuple(self.calls[place].name for place in self._longest_path())

    @property
    def branches(self) -> tuple[Branches, ...]:
        """Branches that could run side by side, by falling gain."""
        dominators = self._dominators()
        candidates = []
        for place, call in enumerate(self.calls):
            if len(set(call.inputs)) > 1 and (branches := self._branches_into(place, dominators[place])) is not None:
                candidates.append(branches)
        return tuple(sorted(candidates, key=lambda branches: -branches.gain))

    def _longest_path(self) -> list[int]:
        costs: list[int] = []
        before: list[int | None] = []
        for call in self.calls:
            last = max(call.inputs, key=lambda place: costs[place], default=None)
            before.append(last)
            costs.append(call.flops + (0 if last is None else costs[last]))
        place = max(range(len(costs)), key=costs.__getitem__, default=None)
        path = []
        while place is not None:
            path.append(place)
            place = before[place]
        return path[::-1]

    def _dominators(self) -> list[int | None]:
        """Returns for each call the last call that all paths to it from the inputs pass; None if there is none."""
        dominators: list[int | None] = []
        levels: list[int] = []
        for call in self.calls:
            common: int | None = None
            for number, place in enumerate(call.inputs):
                other: int | None = place
                if number == 0:
                    common = place
                    continue
                while common != other:
                    if common is None or (other is not None and levels[other] > levels[common]):
                        other = None if other is None else dominators[other]
                    else:
                        common = dominators[common]
            dominators.append(common)
            levels.append(0 if common is None else levels[common] + 1)
        return dominators

    def _branches_into(self, place: int, begin: int | None) -> Branches | None:
        """Returns the branches that meet in a call; None if fewer than two are independent."""
        parts: list[set[int]] = []
        for source in dict.fromkeys(self.calls[place].inputs):
            if source == begin:
                continue
            part = self._between(begin, source)
            for other in [other for other in parts if other & part]:
                parts.remove(other)
                part |= other
            parts.append(part)
        if len(parts) < 2:
            return None
        names = tuple(tuple(self.calls[number].name for number in sorted(part)) for part in parts)
        costs = tuple(sum(self.calls[number].flops for number in part) for part in parts)
        return Branches(None if begin is None else self.calls[begin].name, self.calls[place].name, names, costs)

    def _between(self, begin: int | None, end: int) -> set[int]:
        """Returns the calls on the paths from one call to another, including the last one."""
        reached, left = set(), [end]
        while left:
            place = left.pop()
            if place != begin and place not in reached:
                reached.add(place)
                left.extend(self.calls[place].inputs)
        return reached
