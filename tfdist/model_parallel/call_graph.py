"""The graph of a model's calls with their costs: work, depth, and what could run side by side. It knows no Keras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One call of a layer or an operation, for one batch.

    Attributes:
        name: of the layer; a later call of the same one has its number behind it.
        kind: of layer.
        inputs: places of the calls whose outputs it takes, in the graph; none for what takes the model's inputs only.
        flops: floating-point operations of the forward pass.
        parameters: of the layer, at its first call.
        activations: bytes of its outputs.
        device: that a `tfdist.device_scope` asked for; None without one.
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
    """Parts of a graph that do not depend on each other, between where they begin and where they meet.

    Attributes:
        begin: name of the call behind which they begin; None for the model's inputs.
        end: name of the call in which they meet.
        parts: names of the calls of each branch.
        flops: of each branch.
    """

    begin: str | None
    end: str
    parts: tuple[tuple[str, ...], ...]
    flops: tuple[int, ...]

    @property
    def gain(self) -> int:
        """Floating-point operations that nobody waits for if each branch has a device of its own."""
        return sum(self.flops) - max(self.flops)


class CallGraph:
    """The calls of a model.

    Args:
        calls: in an order in which they can run.

    Attributes:
        calls: as given.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)

    @property
    def work(self) -> int:
        """W: all floating-point operations."""
        return sum(call.flops for call in self.calls)

    @property
    def depth(self) -> int:
        """D: the floating-point operations on the critical path, which no number of devices avoids."""
        return sum(self.calls[place].flops for place in self._longest_path())

    @property
    def parallelism(self) -> float:
        """W / D: how many times as fast any number of devices could run the calls side by side, at best."""
        return self.work / self.depth if self.depth else 1.0

    @property
    def critical_path(self) -> tuple[str, ...]:
        """Names of the calls of the most costly path."""
        return tuple(self.calls[place].name for place in self._longest_path())

    @property
    def branches(self) -> tuple[Branches, ...]:
        """Branches that could run side by side, the most worthwhile first."""
        dominators = self._dominators()
        found = []
        for place, call in enumerate(self.calls):
            if len(set(call.inputs)) > 1 and (one := self._branches_into(place, dominators[place])) is not None:
                found.append(one)
        return tuple(sorted(found, key=lambda one: -one.gain))

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
        """For each call, the last one that all paths to it from the inputs pass; None if there is none."""
        found: list[int | None] = []
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
                        other = None if other is None else found[other]
                    else:
                        common = found[common]
            found.append(common)
            levels.append(0 if common is None else levels[common] + 1)
        return found

    def _branches_into(self, place: int, begin: int | None) -> Branches | None:
        """The branches that meet in a call; None if all of what meets there depends on each other."""
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
        names = tuple(tuple(self.calls[one].name for one in sorted(part)) for part in parts)
        costs = tuple(sum(self.calls[one].flops for one in part) for part in parts)
        return Branches(None if begin is None else self.calls[begin].name, self.calls[place].name, names, costs)

    def _between(self, begin: int | None, end: int) -> set[int]:
        """Calls on the paths from one to another, with the other."""
        found, left = set(), [end]
        while left:
            place = left.pop()
            if place != begin and place not in found:
                found.add(place)
                left.extend(self.calls[place].inputs)
        return found
