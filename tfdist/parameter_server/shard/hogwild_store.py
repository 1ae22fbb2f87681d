"""The values of a shard in shared memory that workers change themselves (`Hogwild`)."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tfdist.parameter_server.protocol.anonymous_memory import MemoryLocation
from tfdist.parameter_server.protocol.changes import Edition
from tfdist.parameter_server.protocol.gradients import Kind, PushedGradients, Shapes
from tfdist.parameter_server.protocol.hogwild_memory import PLACES, Memory, Writer
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.shard.ledger import Ledger

_OWN_PLACE = 0


class MemoryStore:
    """A shard's variables in a shared `Memory`, in place of a `tfdist.parameter_server.shard.store.Store`.

    It has no optimizer. Workers on this machine write to the memory. Workers on other machines push what their
    optimizers have changed, as with `LocalSteps`: an update u as the gradient −u.

    Args:
        held: descriptions of the variables.
        state: first values of the variables, and the number of earlier updates as the scalar ``"iteration"``.
        optimizer: the workers' optimizer, serialized.

    Attributes:
        held: descriptions of the variables.
        config: the workers' optimizer, serialized.
        shapes: shapes and dtypes of the variables.

    Raises:
        ValueError: the system has no such memory, or no memory is left.
    """

    def __init__(self, held: Sequence[HeldRows], state: TrainingState, optimizer: dict[str, Any]) -> None:
        self.held = list(held)
        self.config = optimizer
        self.shapes = Shapes([value.shape for value in state.values], [value.dtype for value in state.values])
        try:
            self._memory = Memory.make(self.shapes)
        except OSError as error:
            raise ValueError(f"Hogwild() needs memory that processes share: {error}") from None
        weakref.finalize(self, self.where.close)
        self._writer = Writer(self._memory, _OWN_PLACE)
        for array, value in zip(self._memory.arrays, state.values, strict=True):
            array[...] = value
        self._updates = int(state.scalars.get("iteration", 0))
        self._assigned = 0
        self._settled = self._memory.counts.copy()
        self._places: dict[int, int] = {}

    @property
    def where(self) -> MemoryLocation:
        """Location of the memory, for workers to open."""
        return self._memory.where

    @property
    def iterations(self) -> int:
        """The number of updates of all workers so far."""
        return self._updates + self._memory.updates()

    @property
    def edition(self) -> Edition:
        """The edition of the current values, which changes with them."""
        return int.from_bytes(self.where.token[:7]), self.iterations + self._assigned

    def opened(self, worker: int) -> tuple[MemoryLocation, int]:
        """Returns the location of the memory, and a worker's own place in it.

        Args:
            worker: task number of the worker.

        Raises:
            ValueError: all places are taken.
        """
        if worker not in self._places and len(self._places) == PLACES - 1:
            raise ValueError(f"Hogwild() has room for {PLACES - 1} workers on a machine")
        return self.where, self._places.setdefault(worker, 1 + len(self._places))

    def vectors(self, kinds: Sequence[Kind] | None = None) -> list[np.ndarray]:
        """Returns a copy of the values, in the layout for these kinds. Workers may write while it is made."""
        return self.shapes.layout(kinds).vectors(self._memory.arrays)

    def since(self, edition: Edition | None = None, places: Collection[int] = ()) -> PushedGradients:
        """Returns all values: the store does not track which rows have changed."""
        dense: Kind = "dense"
        return PushedGradients((dense,) * len(self.held), self.vectors())

    def averages(self) -> None:
        """Returns None: the workers' optimizers keep the averages."""

    def state(self) -> TrainingState:
        """Returns a copy of the values, and the number of updates."""
        values = [array.copy() for array in self._memory.arrays]
        return TrainingState(values, [{} for _ in values], {"iteration": np.array(self.iterations)})

    def set_learning_rate(self, value: float) -> None:
        """Refuses a learning rate, as each worker's optimizer has its own.

        Raises:
            TypeError: raised in every case.
        """
        raise TypeError("with Hogwild() the learning rate is each worker's own")

    def assign(self, vectors: Sequence[np.ndarray]) -> None:
        """Assigns values to all variables.

        Args:
            vectors: values in the layout of all variables.

        Raises:
            ValueError: the vectors do not fit the variables.
        """
        self.shapes.layout().check(vectors)
        for place, value in self.shapes.layout().arrays(vectors).items():
            self._writer.assign(place, value)
        self._assigned += 1

    def update(self, gradients: PushedGradients) -> None:
        """Applies the push of a worker on another machine.

        Args:
            gradients: differences that are subtracted from the values.
        """
        for place, change in self.shapes.layout(gradients.kinds).arrays(gradients.vectors).items():
            self._writer.add(place, -change)
        for place, (rows, indices) in gradients.sparse.items():
            distinct, inverse = np.unique(indices, return_inverse=True)
            change = np.zeros((len(distinct), *rows.shape[1:]), rows.dtype)
            np.subtract.at(change, inverse.reshape(-1), rows)
            self._writer.add_rows(place, distinct, change)
        self._updates += 1

    def settle(self, ledger: Ledger) -> None:
        """Counts the updates that workers have made since the last call.

        Args:
            ledger: the shard's ledger, which counts them.
        """
        counts = self._memory.counts.copy()
        new, self._settled = counts - self._settled, counts
        for worker, place in self._places.items():
            for staleness in np.flatnonzero(new[place]):
                ledger.staleness[int(staleness)] += int(new[place, staleness])
            made = int(new[place].sum())
            ledger.counted[worker] += made
            ledger.version += made
            if worker in ledger.workers:
                ledger.workers[worker].clock += made
