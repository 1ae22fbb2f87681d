"""The state of one tensor's compression on one rank."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

_BOUNDS = "bounds"


class State:
    """A tensor's residual and other state of its method; also its source of randomness.

    Args:
        name: the tensor's name; the same on all ranks.
        rank: this process's rank.
        size: the number of processes.
        seed: the seed of all randomness.
        shape: the tensor's shape; flat by default.

    Attributes:
        step: the number of times the tensor has been encoded.
        arrays: the state arrays, by name.
        scalers: the scalers that the ranks agreed on for the current step (`Method.scalers`); else None.
    """

    def __init__(
        self, name: str = "", rank: int = 0, size: int = 1, seed: int = 0, shape: tuple[int, ...] | None = None
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.seed = seed
        self.shape = shape
        self.step = 0
        self.arrays: dict[str, np.ndarray] = {}
        self.scalers: np.ndarray | None = None
        self._parts: dict[str, State] = {}

    def array(self, name: str, like: np.ndarray) -> np.ndarray:
        """Returns the state array of a name, with the shape and dtype of ``like``; initially zeros."""
        kept = self.arrays.get(name)
        if kept is None or kept.shape != like.shape or kept.dtype != like.dtype:
            kept = self.arrays[name] = np.zeros_like(like)
        return kept

    @property
    def parts(self) -> list[slice]:
        """The parts that are encoded separately, one for each rank; empty if the tensor is encoded as a whole."""
        bounds = self.arrays.get(_BOUNDS, np.zeros(1, np.int64)).tolist()
        return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]

    def divide(self, parts: Sequence[slice]) -> None:
        """Sets the parts that are encoded separately. Residuals of previous parts move to the whole tensor's.

        Args:
            parts: consecutive parts, one for each rank; empty to encode the tensor as a whole.
        """
        if list(parts) == self.parts:
            return
        for rank, part in enumerate(self.parts):
            for name in [f"for {rank}", "sum"] if rank == self.rank else [f"for {rank}"]:
                unsent = self.part(name).arrays.get("residual")
                if unsent is not None:
                    self.array("residual", np.empty(self.parts[-1].stop, unsent.dtype))[part] += unsent
        self._parts.clear()
        self.arrays[_BOUNDS] = np.array([0, *(part.stop for part in parts)])

    def part(self, name: str) -> State:
        """Returns the state of a part of the tensor.

        Args:
            name: ``for k`` is the part for rank k, ``sum`` the sum of this rank's part.
        """
        if name not in self._parts:
            self._parts[name] = State(f"{self.name}/{name}", self.rank, self.size, self.seed, self.shape)
        part = self._parts[name]
        part.step = self.step
        return part

    def generator(self, shared: bool = False) -> np.random.Generator:
        """Returns a random number generator for this tensor and step.

        Args:
            shared: whether all ranks draw the same numbers.
        """
        stream = self.size if shared else self.rank
        entropy = [self.seed, zlib.crc32(self.name.encode()), self.step, stream]
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(entropy)))

    def clear(self) -> None:
        """Resets to the state before the first step."""
        self.step = 0
        self.arrays.clear()
        self._parts.clear()

    def saved(self, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
        """Yields all arrays, by path, and the step."""
        yield f"{prefix}step", np.array(self.step)
        for name, array in self.arrays.items():
            yield f"{prefix}arrays/{name}", array
        for name, part in self._parts.items():
            yield from part.saved(f"{prefix}parts/{name}/")

    def restore(self, path: str, array: np.ndarray) -> None:
        """Restores an array that `saved` yielded."""
        kind, _, rest = path.partition("/")
        if kind == "step":
            self.step = int(array)
        elif kind == "arrays":
            self.arrays[rest] = np.array(array)
        else:
            name, _, inner = rest.partition("/")
            self.part(name).restore(inner, array)
