"""All compressed tensors of a process: the schedule and the state of each."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.collectives.schedule import Plan
from tfdist.compression import memory, policy, reduction
from tfdist.compression.fusion import Chooser, Reduction, Traffic, fuse_reductions, ring_bytes
from tfdist.compression.method import as_working
from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.compression.state import State

log = logging.getLogger("tfdist")

_DAMAGED = (
    ValueError, KeyError, TypeError, EOFError, RuntimeError, NotImplementedError, zlib.error, zipfile.BadZipFile
)  # fmt: skip
"""Errors that NumPy and zipfile raise if a file is not as `Compressor.save` wrote it."""

Variables = Mapping[str, tuple[str, tuple[int, ...]]]
"""Path and shape of variables, by their keys, which no other variables of the process have."""


_NAME = "name"
"""Label of a tensor's name among the arrays of its state."""
_OF_VARIABLE = "variable"
"""First word of the names, in a file, of variables that are not known to be weights of a model."""


@dataclass(frozen=True)
class Compressed:
    """A tensor that is compressed, at least in some steps, or gets momentum.

    Attributes:
        path: the path of its variable.
        schedule: the choice for each step.
        state: the tensor's state.
        momentum: the momentum applied in place of the optimizer's; 0 for none.
        traffic: counts of this process's bytes for the tensor.
    """

    path: str
    schedule: Schedule
    state: State
    momentum: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    def begin(self, vector: np.ndarray, out: np.ndarray, parts: Sequence[slice] | None = None) -> Reduction:
        """Starts the next step; see `begin` and `begin_scattered` of `tfdist.compression.reduction`."""
        choice = self.schedule.at(self.state.step)
        self.traffic.given_bytes += vector.nbytes
        if parts is None:
            self.traffic.plain_bytes += ring_bytes(vector.nbytes, self.state.size)
            return reduction.begin(choice, vector, out, self.state, self.momentum)
        self.traffic.plain_bytes += vector.nbytes - out.nbytes
        return reduction.begin_scattered(choice, vector, parts, out, self.state)

    def alone(self, array: np.ndarray) -> np.ndarray:
        """Runs the next step of a single process: applies momentum, without compression."""
        vector = as_working(array.reshape(-1))
        self.state.step += 1
        return reduction.with_momentum(vector, self.state, self.momentum).astype(array.dtype).reshape(array.shape)


def begin(
    tensors: Sequence[Compressed],
    vector: np.ndarray,
    out: np.ndarray,
    choose: Chooser,
    parts: Sequence[Sequence[slice]] | None = None,
) -> Plan:
    """Starts the next step of the tensors of one bucket.

    Args:
        tensors: the tensors, in their order in the vector.
        vector: their elements, one-dimensional; only read.
        out: receives their sums, or this rank's parts of them; one-dimensional.
        choose: returns the all-reduce algorithm for a number of bytes, for linear methods.
        parts: for each tensor, consecutive parts of its elements, one for each rank, which gets the sum of its part
            only; by default each rank gets whole sums.

    Returns:
        A plan for the engine. Its result is None.
    """
    memory.keep_freed()
    rank = tensors[0].state.rank
    sizes = [math.prod(tensor.state.shape or ()) for tensor in tensors]
    own = sizes if parts is None else [listed[rank].stop - listed[rank].start for listed in parts]
    vectors, outs = np.split(vector, np.cumsum(sizes)[:-1]), np.split(out, np.cumsum(own)[:-1])
    cuts: Sequence[Sequence[slice] | None] = [None] * len(tensors) if parts is None else parts
    pieces = zip(tensors, vectors, outs, cuts, strict=True)
    begun = [(tensor.begin(given, total, cut), tensor.traffic) for tensor, given, total, cut in pieces]
    return fuse_reductions(begun, choose)


class Compressor:
    """Holds the variables whose gradients are compressed.

    Args:
        compression: the ``compression`` argument of a strategy.
        rank: this process's rank.
        size: the number of processes.
        part: name of the part of a model whose gradients these processes reduce, if others of the job reduce others.
        scatters: whether each process gets the sums of its own parts of gradients only.

    Raises:
        TypeError: ``compression`` is not a method, a schedule or a policy.
        ValueError: sums are scattered, and a method cannot do that; see `tfdist.compression.policy.as_policy`.
    """

    def __init__(
        self,
        compression: Choice | Schedule | Policy,
        rank: int = 0,
        size: int = 1,
        part: str = "",
        scatters: bool = False,
    ) -> None:
        self._policy = policy.as_policy(compression, scatters)
        self._scatters = scatters
        self._rank, self._size = rank, size
        self._part = part
        self._variables: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._momentum: dict[str, float] = {}
        self._tensors: dict[str, Compressed | None] = {}
        self._restored: dict[str, dict[str, np.ndarray]] = {}
        """States that were read and have no tensor yet: by key; of unknown variables, by their name in the file."""

    def __repr__(self) -> str:
        return repr(self._policy)

    def register(self, variables: Variables) -> None:
        """Registers the variables of one optimizer, whose gradients are about to be reduced.

        If the method for one of them applies momentum in place of the optimizer, all of them get it.

        Args:
            variables: the variables.

        Raises:
            ValueError: methods for the variables apply different momentum.
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

    def tensor(self, key: str, gradient: Any) -> Compressed | None:
        """Returns how the gradient of a variable is compressed; None if it is not compressed and gets no momentum.

        Args:
            key: the key of a registered variable.
            gradient: a dense tensor.
        """
        if key not in self._tensors:
            path, shape = self._variables[key]
            floating = gradient.dtype.name in ("float16", "bfloat16", "float32", "float64")
            momentum = self._momentum[key] if floating else 0.0
            schedule = policy.chosen(self._policy, path, shape) if floating else None
            if schedule is not None and self._scatters:
                policy.check_scatters(schedule, path)
            if schedule is None and momentum:
                schedule = Schedule({0: None})
            self._tensors[key] = None if schedule is None else self._begun(key, schedule, momentum)
        return self._tensors[key]

    def _begun(self, key: str, schedule: Schedule, momentum: float) -> Compressed:
        path, shape = self._variables[key]
        state = State(_name("tensor", len(self._tensors), path, shape), self._rank, self._size, shape=shape)
        self._take_over(key, state)
        return Compressed(path, schedule, state, momentum)

    def _take_over(self, key: str, state: State) -> None:
        """Gives a variable the state that was read for it, if there is any."""
        if not self._restored:
            return
        own_name = _name(_OF_VARIABLE, list(self._variables).index(key), *self._variables[key])
        if (kept := self._restored.pop(key, None) or self._restored.pop(own_name, None)) is not None:
            state.clear()
            state.name = str(kept[_NAME])  # of which the random numbers depend
            for label, array in kept.items():
                if label != _NAME:
                    state.restore(label, array)

    # Reporting.

    def traffic(self) -> dict[str, dict[str, int]]:
        """Returns, by variable path, bytes of its gradients, bytes sent, and bytes that a ring would have sent."""
        return {
            tensor.path: dataclasses.asdict(tensor.traffic)
            for tensor in self._tensors.values()
            if tensor is not None and tensor.schedule.compresses
        }

    # Saving.

    def file(self, prefix: Any) -> Path:
        """Returns the path of this rank's file beside a checkpoint."""
        return Path(f"{os.fspath(prefix)}.compression-{self._part}{self._rank}-of-{self._size}.npz")

    def save(self, prefix: Any, weights: Variables | None = None) -> None:
        """Writes this rank's state beside a checkpoint, atomically.

        Args:
            prefix: the checkpoint's path.
            weights: the weights of the checkpoint's model, in the order that they have in any process; those that are
                not compressed have no state. By default all variables, in the order in which they were registered.
        """
        if "://" in os.fspath(prefix):
            log.warning(
                "tfdist: the residuals of compression can be saved only to local files; not saved for %s", prefix
            )
            return
        arrays: dict[str, Any] = {}
        for name, key in self._names(weights).items():
            tensor = self._tensors.get(key)
            if tensor is None:
                kept = self._restored.get(key) or self._restored.get(name) or {}
            else:
                kept = {_NAME: np.array(tensor.state.name), **dict(tensor.state.saved())}
            arrays.update({f"{name}/{label}": array for label, array in kept.items()})
        path = self.file(prefix)
        partial = path.with_name(f".{uuid.uuid4().hex[:8]}.{path.name}")
        try:
            with open(partial, "wb") as stream:
                np.savez(stream, **arrays)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _names(self, weights: Variables | None) -> dict[str, str]:
        """Returns the keys of variables by their names in a file."""
        what, listed = (_OF_VARIABLE, self._variables) if weights is None else ("weight", weights)
        return {_name(what, place, *listed[key]): key for place, key in enumerate(listed)}

    def load(self, prefix: Any, weights: Variables | None = None) -> int:
        """Reads what `save` wrote, for `adopt` and for variables that are first used later.

        Args:
            prefix: the checkpoint's path.
            weights: as for `save`.

        Returns:
            A checksum of the steps that were read, to be compared over ranks; 0 if there is no file.

        Raises:
            OSError: the file exists but cannot be read.
        """
        self._drop(weights)
        path = self.file(prefix)
        if not path.exists():
            others = f"{glob.escape(path.name.partition('.compression-')[0])}.compression-{self._part}0-of-*.npz"
            if self._rank == 0 and (matches := sorted(path.parent.glob(others))):
                log.warning(
                    "tfdist: %s is not used: it was saved by another number of processes than the current %d",
                    matches[0],
                    self._size,
                )
            return 0
        found: dict[str, dict[str, np.ndarray]] = {}
        try:
            with np.load(path) as arrays:
                for entry in arrays.files:
                    name, _, label = entry.partition("/")
                    found.setdefault(name, {})[label] = arrays[entry]
            steps = sorted((name, str(kept[_NAME]), int(kept["step"])) for name, kept in found.items())
        except _DAMAGED as error:
            raise OSError(
                f"{path} does not hold the state of compression ({error}); delete it to start without residuals"
            ) from None
        names = self._names(weights)
        if weights is not None and (unknown := found.keys() - names.keys()):
            log.warning(
                "tfdist: %s has residuals of %d variables that the model does not have, such as %s; they are not used",
                path,
                len(unknown),
                min(unknown),
            )
        for name in found if weights is None else found.keys() & names.keys():
            self._restored[name if weights is None else names[name]] = found[name]
        return 1 + zlib.crc32(repr(steps).encode())

    def adopt(self) -> None:
        """Restores the state that `load` has read for variables that have some; others get theirs on first use."""
        for key, tensor in self._tensors.items():
            if tensor is not None:
                self._take_over(key, tensor.state)

    def forget(self, weights: Variables | None = None) -> None:
        """Clears the state of variables.

        Args:
            weights: variables; by default all.
        """
        self._drop(weights)
        for key in self._variables if weights is None else weights:
            if (tensor := self._tensors.get(key)) is not None:
                tensor.state.clear()

    def _drop(self, weights: Variables | None) -> None:
        """Drops what was read for variables and has not been used."""
        known = self._variables if weights is None else weights
        for key in [*self._restored]:
            if key in known or (weights is None and key.startswith(_OF_VARIABLE)):
                del self._restored[key]


def _name(what: str, place: int, path: str, shape: tuple[int, ...]) -> str:
    """Returns a name that is equal in all processes and runs: the numbers in a path count what a process has built.

    Only the end of a path stays when a model is loaded: the names of a layer and of its variable.
    """
    kind = re.sub(r"_\d+(?=/|$)", "", path).split("/")[-2:]
    return f"{what} {place} {'.'.join(kind)} {list(shape)}"
