"""The variables of a model, divided over parameter servers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from math import prod

import msgspec
import numpy as np

from tfdist.compression.policy import Policy
from tfdist.parameter_server.protocol.differences import ParameterDecoder
from tfdist.parameter_server.protocol.gradients import Shapes
from tfdist.parameter_server.protocol.packing import Packer, VariableSpec
from tfdist.parameter_server.protocol.shared_memory import area_of
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.worker.replica import Replica
from tfdist.sharding import ShardAssignment, Variable, VariablePart, assign_shards
from tfdist.tensors import unnumbered


class Model:
    """The variables of a model, and their division over servers.

    Args:
        paths: path of each variable, as Keras names it.
        shapes: shape of each variable.
        dtypes: dtype of each variable.
        servers: number of servers.
        splits: for each variable, whether it may be split by rows.
        optimizer: name of the optimizer's class.
        options: text with name and value of each option of the optimizer that is the same on every worker.

    Attributes:
        name: the optimizer and a digest of the variables; the same on every worker, and for any number of servers.
        paths: path of each variable, without the numbers that Keras adds if a process has built models before. Equal
            paths get a number that tells them apart.
        dealing: division of the variables over the servers.
        shapes: by server, the shapes and dtypes of its parts.
        described: text with path, shape and dtype of each variable.
        options: as given.
        nbytes: bytes of all variables.
    """

    def __init__(
        self,
        paths: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[np.dtype],
        servers: int,
        splits: Sequence[bool],
        optimizer: str = "",
        options: Sequence[str] = (),
    ) -> None:
        self.paths = _unique(paths)
        self._shapes = list(shapes)
        self._dtypes = list(dtypes)
        described = [
            Variable(shape, dtype.itemsize, may) for shape, dtype, may in zip(shapes, dtypes, splits, strict=True)
        ]
        self.dealing: ShardAssignment = assign_shards(described, servers)
        self.shapes = [
            Shapes([self._shape(part) for part in parts], [dtypes[part.variable] for part in parts])
            for parts in self.dealing.shards
        ]
        self.nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        self.described = tuple(
            f"{path} {list(shape)} {dtype.name}" for path, shape, dtype in zip(self.paths, shapes, dtypes, strict=True)
        )
        self.options = tuple(options)
        self.name = f"{optimizer}-{_digest([self.described, list(splits)])}"

    def _shape(self, part: VariablePart) -> tuple[int, ...]:
        shape = self._shapes[part.variable]
        return (part.end - part.begin, *shape[1:]) if shape else ()

    def is_whole(self, part: VariablePart) -> bool:
        """Returns whether a part is a whole variable."""
        shape = self._shapes[part.variable]
        return not shape or part.end - part.begin == shape[0]

    def replicas(self, compression: Policy | None) -> list[Replica]:
        """Returns copies of the servers' variables, one for each server.

        Args:
            compression: policy by which the servers compress parameters; None for no compression.
        """
        if compression is None:
            return [Replica(shapes) for shapes in self.shapes]
        whole = [VariableSpec(path, shape) for path, shape in zip(self.paths, self._shapes, strict=True)]
        return [
            Replica(shapes, ParameterDecoder(compression, [whole[part.variable] for part in parts], shapes))
            for parts, shapes in zip(self.dealing.shards, self.shapes, strict=True)
        ]

    def packers(self, compression: Policy, worker: int) -> list[Packer]:
        """Returns the encoders of a worker's gradients, one for each server.

        Args:
            compression: policy that chooses a method for each variable.
            worker: number of the worker.
        """
        whole = [VariableSpec(path, shape) for path, shape in zip(self.paths, self._shapes, strict=True)]
        return [
            Packer(compression, [whole[part.variable] for part in parts], shapes, worker)
            for parts, shapes in zip(self.dealing.shards, self.shapes, strict=True)
        ]

    def area(self, server: int) -> int:
        """Returns the bytes of an area of shared memory for the arrays of a server."""
        shapes = self.shapes[server]
        return area_of(shapes.shapes, [dtype.itemsize for dtype in shapes.dtypes])

    def held(self, server: int, described: Sequence[HeldRows]) -> tuple[HeldRows, ...]:
        """Returns the rows of variables that a server holds.

        Args:
            server: index of the server.
            described: description of each whole variable.
        """
        return tuple(
            msgspec.structs.replace(described[part.variable], begin=part.begin, end=part.end)
            for part in self.dealing.shards[server]
        )

    def part_of(self, server: int, state: TrainingState) -> TrainingState:
        """Returns a server's part of a state.

        Args:
            server: index of the server.
            state: state of the whole model.
        """
        parts = self.dealing.shards[server]
        slots = [
            {
                name: part.rows(array) if array.shape == self._shapes[part.variable] else array
                for name, array in state.slots[part.variable].items()
            }
            if state.slots
            else {}
            for part in parts
        ]
        return TrainingState([part.rows(state.values[part.variable]) for part in parts], slots, state.scalars)

    def whole(self, shard_arrays: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Joins the arrays of the variables' parts into one for each variable.

        Args:
            shard_arrays: by server, an array for each part.
        """
        parts: list[list[tuple[int, np.ndarray]]] = [[] for _ in self._shapes]
        for shard, arrays in zip(self.dealing.shards, shard_arrays, strict=True):
            for part, array in zip(shard, arrays, strict=True):
                parts[part.variable].append((part.begin, array))
        return [
            pieces[0][1]
            if len(pieces) == 1
            else np.concatenate([array for _, array in sorted(pieces, key=lambda piece: piece[0])])
            for pieces in parts
        ]

    def whole_state(self, states: Sequence[TrainingState]) -> TrainingState:
        """Joins the servers' parts of a state; the inverse of `part_of`.

        Args:
            states: by server, its part.
        """
        values = self.whole([state.values for state in states])
        parts = Counter(part.variable for shard in self.dealing.shards for part in shard)
        slots: list[dict[str, np.ndarray]] = [{} for _ in values]
        for name in dict.fromkeys(name for state in states for by_name in state.slots for name in by_name):
            missing = np.empty(0)
            joined = self.whole([[by_name.get(name, missing) for by_name in state.slots] for state in states])
            for place, (by_name, array, value) in enumerate(zip(slots, joined, values, strict=True)):
                if array.shape == value.shape or (parts[place] == 1 and array.size):
                    by_name[name] = array
        return TrainingState(
            values, slots, max((state.scalars for state in states), key=lambda scalars: int(scalars["iteration"]))
        )


def _unique(paths: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    unique = []
    for path in map(unnumbered, paths):
        unique.append(f"{path}#{seen[path]}" if seen[path] else path)
        seen[path] += 1
    return unique


def _digest(described: list[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:16]
