"""All compressed tensors of a process: what is done to each, and what is kept of it."""

from __future__ import annotations

import dataclasses
import glob
import logging
import math
import os
import re
import uuid
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.collectives.schedule import Plan
from tfdist.compression import memory, policy, reduction
from tfdist.compression.fusion import Chooser, Reduction, Traffic, ring_bytes, together
from tfdist.compression.method import as_working
from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.compression.state import State

log = logging.getLogger("tfdist")

_DAMAGED = (
    ValueError, KeyError, TypeError, EOFError, RuntimeError, NotImplementedError, zlib.error, zipfile.BadZipFile
)  # fmt: skip
"""What NumPy and zipfile raise where a file is not what `Compressor.save` wrote."""


@dataclass(frozen=True)
class Compressed:
    """A tensor that is compressed, at least in some steps, or gets momentum.

    Attributes:
        path: of its variable.
        schedule: what is done in which step.
        state: what is kept of it.
        momentum: that it gets in place of the optimizer's; 0 for none.
        traffic: of this process.
    """

    path: str
    schedule: Schedule
    state: State
    momentum: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    def begin(self, vector: np.ndarray, out: np.ndarray) -> Reduction:
        """Begins the next step; see `tfdist.compression.reduction.begin`."""
        self.traffic.given_bytes += vector.nbytes
        self.traffic.plain_bytes += ring_bytes(vector.nbytes, self.state.size)
        return reduction.begin(self.schedule.at(self.state.step), vector, out, self.state, self.momentum)

    def alone(self, array: np.ndarray) -> np.ndarray:
        """The next step where there is nobody to send to: nothing is compressed, and momentum is applied."""
        vector = as_working(array.reshape(-1))
        self.state.step += 1
        return reduction.with_momentum(vector, self.state, self.momentum).astype(array.dtype).reshape(array.shape)


def all_reduce(tensors: Sequence[Compressed], vector: np.ndarray, out: np.ndarray, choose: Chooser) -> Plan:
    """Begins the next step of tensors that travel together.

    Args:
        tensors: in their order in the vector.
        vector: their elements, one-dimensional; only read.
        out: receives their sums; like ``vector``.
        choose: names the all-reduce algorithm for so many bytes, where what is sent adds up.

    Returns:
        A plan for the engine. Its result is None.
    """
    memory.keep_freed()
    ends = np.cumsum([math.prod(tensor.state.shape or ()) for tensor in tensors])[:-1]
    pieces = zip(tensors, np.split(vector, ends), np.split(out, ends), strict=True)
    return together([(tensor.begin(own, total), tensor.traffic) for tensor, own, total in pieces], choose)


class Compressor:
    """Knows the variables whose gradients are compressed.

    Args:
        compression: what a user gave to a strategy.
        rank: of this process.
        size: number of processes.
        seed: of all randomness; the same on all ranks.

    Raises:
        TypeError: ``compression`` is nothing of the kind.
    """

    def __init__(self, compression: Choice | Schedule | Policy, rank: int = 0, size: int = 1, seed: int = 0) -> None:
        self._policy = policy.as_policy(compression)
        self._rank, self._size, self._seed = rank, size, seed
        self._variables: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._momentum: dict[str, float] = {}
        self._tensors: dict[str, Compressed | None] = {}
        self._restored: dict[str, dict[str, np.ndarray]] = {}

    def __repr__(self) -> str:
        return repr(self._policy)

    def register(self, variables: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        """Registers variables whose gradients are about to be reduced.

        They are those of one optimizer. Where a method for one of them applies momentum in its place, all get it.

        Raises:
            ValueError: methods for them apply different momentum.
        """
        schedules = [policy.chosen(self._policy, path, shape) for path, shape in variables.values()]
        momenta = set().union(*(schedule.momenta for schedule in schedules if schedule is not None))
        if len(momenta) > 1:
            raise ValueError(
                f"methods that replace an optimizer's momentum must agree on it; got {sorted(momenta)} for the "
                f"variables of one optimizer, in {self._policy!r}"
            )
        self._momentum.update(dict.fromkeys(variables, max(momenta, default=0.0)))
        self._variables.update(variables)

    def tensor(self, identity: str, gradient: Any) -> Compressed | None:
        """How the gradient of a variable is compressed; None where it is not, and gets no momentum either.

        Args:
            identity: an id that was made known.
            gradient: a dense tensor.
        """
        if identity not in self._tensors:
            path, shape = self._variables[identity]
            floating = gradient.dtype.name in ("float16", "bfloat16", "float32", "float64")
            momentum = self._momentum[identity] if floating else 0.0
            schedule = policy.chosen(self._policy, path, shape) if floating else None
            if schedule is None and momentum:
                schedule = Schedule({0: None})
            self._tensors[identity] = (
                None
                if schedule is None
                else Compressed(path, schedule, self._new_state(path, shape, schedule.compresses), momentum)
            )
        return self._tensors[identity]

    def _new_state(self, path: str, shape: tuple[int, ...], compresses: bool) -> State:
        # Known by its place, too: a path's numbers count what a process has built, and so differ from run to run.
        # Of a path only its end stays when a model is loaded: the names of a layer and of its variable.
        kind = re.sub(r"_\d+(?=/|$)", "", path).split("/")[-2:]
        place = sum(one is not None and one.schedule.compresses == compresses for one in self._tensors.values())
        name = f"{'' if compresses else 'uncompressed '}{place} {'.'.join(kind)} {list(shape)}"
        state = State(name, self._rank, self._size, self._seed, shape)
        for kept, array in self._restored.pop(name, {}).items():
            state.restore(kept, array)
        return state

    def _states(self) -> list[State]:
        return [tensor.state for tensor in self._tensors.values() if tensor is not None]

    # What is reported.

    def traffic(self) -> dict[str, dict[str, int]]:
        """By the variables' paths: bytes of their gradients, bytes sent, and bytes that a ring would have sent."""
        return {
            tensor.path: dataclasses.asdict(tensor.traffic)
            for tensor in self._tensors.values()
            if tensor is not None and tensor.schedule.compresses
        }

    # What is saved.

    def file(self, prefix: Any) -> Path:
        """Where this rank's part of what belongs to a checkpoint is written."""
        return Path(f"{os.fspath(prefix)}.compression-{self._rank}-of-{self._size}.npz")

    def save(self, prefix: Any) -> None:
        """Writes what this rank keeps, whole or not at all, beside a checkpoint.

        Args:
            prefix: the checkpoint's path.
        """
        if "://" in os.fspath(prefix):
            log.warning("tfdist: the residuals of compression are saved in local files only, not beside %s", prefix)
            return
        arrays: dict[str, Any] = {
            f"{name}/{kept}": array for name, waiting in self._restored.items() for kept, array in waiting.items()
        }
        arrays.update({f"{state.name}/{kept}": array for state in self._states() for kept, array in state.saved()})
        path = self.file(prefix)
        partial = path.with_name(f".{uuid.uuid4().hex[:8]}.{path.name}")
        try:
            with open(partial, "wb") as stream:
                np.savez(stream, **arrays)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def load(self, prefix: Any) -> int:
        """Reads what `save` wrote, for when the variables are there.

        Args:
            prefix: the checkpoint's path.

        Returns:
            A number that is the same on two ranks only if what they read is of the same steps; 0 if there is no file.

        Raises:
            OSError: there is a file, and it cannot be read.
        """
        self._restored.clear()
        path = self.file(prefix)
        if not path.exists():
            others = f"{glob.escape(path.name.partition('.compression-')[0])}.compression-0-of-*.npz"
            if self._rank == 0 and (found := sorted(path.parent.glob(others))):
                log.warning("tfdist: %s is of another number of processes, and is not used", found[0])
            return 0
        try:
            with np.load(path) as arrays:
                for key in arrays.files:
                    name, _, kept = key.partition("/")
                    self._restored.setdefault(name, {})[kept] = arrays[key]
            steps = sorted((name, int(kept["step"])) for name, kept in self._restored.items())
        except _DAMAGED as error:
            self._restored.clear()
            raise OSError(f"{path} does not hold the state of compression ({error}); delete it to begin anew") from None
        return 1 + zlib.crc32(repr(steps).encode())

    def adopt(self) -> None:
        """Gives what `load` has read to the variables that are there already; later ones get theirs when they come."""
        for state in self._states():
            if arrays := self._restored.pop(state.name, None):
                state.clear()
                for kept, array in arrays.items():
                    state.restore(kept, array)

    def forget(self) -> None:
        """Begins anew: nothing is kept."""
        self._restored.clear()
        for state in self._states():
            state.clear()
