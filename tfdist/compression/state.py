"""What compression keeps of one tensor on one rank, from step to step."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

_BOUNDS = "bounds"


class State:
    """The residual of a tensor, and whatever else its method goes on from; also its source of randomness.

    Args:
        name: of the tensor; the same on all ranks.
        rank: of this process.
        size: number of processes.
        seed: of all randomness.
        shape: of the tensor; flat by default.

    Attributes:
        step: how many times the tensor has been encoded.
        arrays: by name.
        scalers: what the ranks have agreed on for the step under way (`Method.scalers`); None before, and alone.
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
        """What is kept under a name: of the shape and dtype of another array, and zeros at first."""
        kept = self.arrays.get(name)
        if kept is None or kept.shape != like.shape or kept.dtype != like.dtype:
            kept = self.arrays[name] = np.zeros_like(like)
        return kept

    @property
    def parts(self) -> list[slice]:
        """What is encoded on its own, a part for each rank; none where the tensor is encoded as a whole."""
        bounds = self.arrays.get(_BOUNDS, np.zeros(1, np.int64)).tolist()
        return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]

    def divide(self, parts: Sequence[slice]) -> None:
        """Says what is encoded on its own from now on. What other parts have left unsent, the whole tensor has then.

        Args:
            parts: one after the other, a part for each rank; none for the whole tensor.
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
        """The state of a part of the tensor: ``for k``, of the one for rank k; ``sum``, of the sum of this rank's."""
        if name not in self._parts:
            self._parts[name] = State(f"{self.name}/{name}", self.rank, self.size, self.seed, self.shape)
        part = self._parts[name]
        part.step = self.step
        return part

    def generator(self, shared: bool = False) -> np.random.Generator:
        """Random numbers for this tensor and step.

        Args:
            shared: whether all ranks draw the same.
        """
        who = self.size if shared else self.rank
        entropy = [self.seed, zlib.crc32(self.name.encode()), self.step, who]
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(entropy)))

    def clear(self) -> None:
        """Keeps nothing, as before the first step."""
        self.step = 0
        self.arrays.clear()
        self._parts.clear()

    def saved(self, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
        """All arrays, by path, and the step."""
        yield f"{prefix}step", np.array(self.step)
        for name, array in self.arrays.items():
            yield f"{prefix}arrays/{name}", array
        for name, part in self._parts.items():
            yield from part.saved(f"{prefix}parts/{name}/")

    def restore(self, path: str, array: np.ndarray) -> None:
        """Takes back an array that `saved` gave."""
        kind, _, rest = path.partition("/")
        if kind == "step":
            self.step = int(array)
        elif kind == "arrays":
            self.arrays[rest] = np.array(array)
        else:
            name, _, inner = rest.partition("/")
            self.part(name).restore(inner, array)
