"""How variables are divided over servers or processes: by bytes, large ones split by rows, or along any axis."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

SPLIT_BYTES = 1 << 18
"""Variables with no more bytes stay whole: updating a part would take as long as updating all."""


@dataclass(frozen=True)
class Variable:
    """What `assign_shards` needs to know about a variable.

    Attributes:
        shape: shape of its value.
        itemsize: bytes of an element.
        splits: whether its rows may be updated apart from each other.
    """

    shape: tuple[int, ...]
    itemsize: int
    splits: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of its value."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class VariablePart:
    """Some rows of a variable, or all of it.

    Attributes:
        variable: index of the variable.
        begin: first row; 0 for a scalar.
        end: row behind the last one; 1 for a scalar.
    """

    variable: int
    begin: int
    end: int

    def rows(self, array: np.ndarray) -> np.ndarray:
        """Returns the part's rows of an array with all rows, as a view."""
        return array[self.begin : self.end] if array.ndim else array


@dataclass(frozen=True)
class ShardAssignment:
    """A division of variables over servers.

    Attributes:
        shards: by server, its parts, in the order of the variables.
        nbytes: by server, the bytes of its parts.
    """

    shards: tuple[tuple[VariablePart, ...], ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class Ownership:
    """The processes that own a variable: one has all of it, each has all of it, or each has a part.

    Parts are cut along one axis; those of axis 0 are rows.

    Attributes:
        owner: rank of the process that alone has the variable; None if each has all or a part.
        bounds: where each part begins along the axis, and where the last one ends; empty if the variable is not cut.
        axis: the axis that it is cut along.
        places: by rank, the number of the part that a process has, as several may have copies of one; None for a
            process that has none. By default each process has the part of its rank.
    """

    owner: int | None
    bounds: tuple[int, ...] = ()
    axis: int = 0
    places: tuple[int | None, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether each process has a part of the variable."""
        return bool(self.bounds)

    @property
    def holders(self) -> tuple[int, ...]:
        """The first rank that has each part, in the order of the parts; one rank that has all if it is not cut."""
        if not self.is_cut:
            return (self.owner or 0,)
        parts = range(len(self.bounds) - 1)
        return tuple(self.places.index(part) if self.places else part for part in parts)

    def includes(self, rank: int) -> bool:
        """Returns whether a process has some of the variable."""
        return self.owner in (None, rank) and not (self.places and self.places[rank] is None)

    def copies(self, processes: int) -> int:
        """Returns the number of processes that have the same of the variable as one that has some.

        Args:
            processes: number of all processes.
        """
        if self.owner is not None:
            return 1
        return processes // (len(self.bounds) - 1) if self.is_cut else processes

    def part(self, rank: int) -> tuple[slice, ...]:
        """Returns the index of a process's part, if the variable is cut."""
        place = self.places[rank] if self.places else rank
        assert place is not None, "this process has no part"
        return (slice(None),) * self.axis + (slice(self.bounds[place], self.bounds[place + 1]),)

    def shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Returns the shape of the part that a process has, of which `includes` is true.

        Args:
            shape: shape of the variable.
            rank: rank of the process.
        """
        return shape_of(shape, self.part(rank)) if self.is_cut else tuple(shape)

    def __str__(self) -> str:
        if not self.is_cut:
            return "all" if self.owner is None else str(self.owner)
        return f"rows {self.bounds}" if not self.axis else f"axis {self.axis} {self.bounds}"


EVERYONE = Ownership(None)
"""Each process has all of the variable."""


def shape_of(shape: Sequence[int], part: Sequence[slice]) -> tuple[int, ...]:
    """Returns the shape of a part of an array.

    Args:
        shape: shape of the array.
        part: the part's index, which may leave out the last axes.
    """
    lengths = (len(range(length)[index]) for length, index in zip(shape, part, strict=False))
    return (*lengths, *shape[len(part) :])


def even_bounds(rows: int, parts: int) -> tuple[int, ...]:
    """Returns the first row of each part, and the number of rows, so that parts differ by a row at most."""
    return tuple(part * rows // parts for part in range(parts + 1))


def assign_owners(variables: Sequence[Variable], processes: int) -> list[Ownership]:
    """Returns the owner of each variable, as `assign_shards` divides them over processes.

    Args:
        variables: the variables, in their order.
        processes: number of processes, at least one.
    """
    parts: list[list[tuple[int, VariablePart]]] = [[] for _ in variables]
    for rank, shard in enumerate(assign_shards(variables, processes).shards):
        for part in shard:
            parts[part.variable].append((rank, part))
    return [
        Ownership(listed[0][0])
        if len(listed) == 1
        else Ownership(None, (*(part.begin for _, part in listed), listed[-1][1].end))
        for listed in parts
    ]


def assign_shards(variables: Sequence[Variable], servers: int) -> ShardAssignment:
    """Divides variables over servers, so that their bytes are as even as whole variables and rows allow.

    Variables that may be split, and are large compared with an equal share, are cut into a part for each server. The
    others go, the largest first, to the server with the fewest bytes so far (Graham's longest processing time, within
    4/3 of the best). The result depends only on the arguments, so that every task computes the same.

    Args:
        variables: the model's variables, in their order.
        servers: number of servers, at least one.

    References:
        Graham, *Bounds on multiprocessing timing anomalies*, SIAM J. Appl. Math. 1969.
    """
    if servers < 1:
        raise ValueError(f"variables need at least one server; got {servers}")
    shards: list[list[VariablePart]] = [[] for _ in range(servers)]
    nbytes = [0] * servers
    share = sum(variable.nbytes for variable in variables) / servers
    whole = []
    for index, variable in enumerate(variables):
        rows = variable.shape[0] if variable.shape else 1
        if servers > 1 and variable.splits and rows >= servers and variable.nbytes > max(SPLIT_BYTES, share / 2):
            row_bytes = variable.nbytes // rows
            bounds = even_bounds(rows, servers)
            for server, (begin, end) in enumerate(itertools.pairwise(bounds)):
                shards[server].append(VariablePart(index, begin, end))
                nbytes[server] += (end - begin) * row_bytes
        else:
            whole.append((-variable.nbytes, index, rows))
    loads = [(load, server) for server, load in enumerate(nbytes)]
    heapq.heapify(loads)
    for negative, index, rows in sorted(whole):
        load, server = heapq.heappop(loads)
        shards[server].append(VariablePart(index, 0, rows))
        nbytes[server] = load - negative
        heapq.heappush(loads, (nbytes[server], server))
    ordered = (tuple(sorted(shard, key=lambda part: (part.variable, part.begin))) for shard in shards)
    return ShardAssignment(tuple(ordered), tuple(nbytes))
