"""What compression keeps of one tensor on one rank, from step to step."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np


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
        given_bytes: of the tensor, over all steps.
        sent_bytes: to other ranks, over all steps.
        plain_bytes: that a ring all-reduce would have sent instead.
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
        self.given_bytes = 0
        self.sent_bytes = 0
        self.plain_bytes = 0
        self._parts: dict[str, State] = {}

    def array(self, name: str, like: np.ndarray) -> np.ndarray:
        """What is kept under a name: of the shape and dtype of another array, and zeros at first."""
        kept = self.arrays.get(name)
        if kept is None or kept.shape != like.shape or kept.dtype != like.dtype:
            kept = self.arrays[name] = np.zeros_like(like)
        return kept

    @property
    def has_parts(self) -> bool:
        """Whether parts of the tensor have been encoded on their own."""
        return bool(self._parts)

    def part(self, name: str) -> State:
        """The state of a part of the tensor, which is encoded on its own."""
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
