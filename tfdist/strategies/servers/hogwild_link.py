"""`Hogwild`: a worker's own Keras optimizer updates the memory of parameter servers on the worker's machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engine.host_calls import host_call
from tfdist.errors import TfdistError
from tfdist.parameter_server.options.pushes import LocalSteps
from tfdist.parameter_server.protocol.hogwild_memory import Memory, Writer
from tfdist.parameter_server.protocol.messages import OpenMemory
from tfdist.parameter_server.protocol.state import TrainingState
from tfdist.parameter_server.shard.row_local import keeps_other_values
from tfdist.parameter_server.worker.observer import Observer
from tfdist.private import optimizers
from tfdist.strategies.servers.local_link import LocalLink
from tfdist.strategies.servers.server_link import Attachment, array_of

log = logging.getLogger("tfdist")


class HogwildLink(LocalLink):
    """Link of an optimizer that updates its variables here, and in memory that all workers of the machine share.

    Where that memory cannot be opened, changes are pushed in each step.

    Args:
        attachment: how this task attaches them.
        optimizer: the Keras optimizer, built.
        variables: the Keras variables.
    """

    def __init__(self, attachment: Attachment, optimizer: Any, variables: Sequence[Any]) -> None:
        self._writers: list[Writer] | None = None
        self._bases: dict[int, np.ndarray] = {}
        super().__init__(attachment, optimizer, variables, LocalSteps())
        shards = self._model.dealing.shards
        self._places = {
            part.variable: (server, number) for server, parts in enumerate(shards) for number, part in enumerate(parts)
        }
        if isinstance(self._session, Observer):
            return
        with self._lock:
            self._writers = self._opened()
        if self._writers is not None:
            self._base = []  # only messages need it
            self._read = list
        else:
            log.warning(
                "tfdist: this worker cannot open the parameter servers' memory, as it is on another machine, in "
                "another container, or another user's: Hogwild() pushes its updates in messages, like LocalSteps(1)."
            )

    def update(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        samples: Any = 1.0,
        apply: Callable[[], None] = lambda: None,
        ticket: Any = None,
    ) -> None:
        """Makes an update here and in the servers' memory, and reads what others have changed; see `Link.update`."""
        if self._writers is None:
            return super().update(gradients, variables, samples, apply, ticket)
        placed = self._placed(gradients, variables)
        by_rows = [place for place, gradient in enumerate(placed) if self._is_by_rows(place, gradient)]
        whole = [place for place in range(len(placed)) if place not in by_rows]
        with tf.init_scope():
            for place in whole:
                if place not in self._bases:
                    self._bases[place] = array_of(self._variables[place])
        indices = [tf.cast(placed[place].indices, tf.int64) for place in by_rows]
        before = self._rows(by_rows, indices)
        apply()
        after = self._rows(by_rows, indices)

        def on_host(_: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            values, rest = arrays[: len(whole)], arrays[len(whole) :]
            rows = [rest[number :: len(by_rows)] for number in range(len(by_rows))]
            with self._lock, self._failing():
                return self._exchanged_rows(whole, values, by_rows, rows)

        values = [self._variables[place].value for place in whole]
        # Depends on the samples to run with a batch: where the data end, Keras runs once more what depends on none.
        inputs = [tf.cast(samples, tf.float64), *values, *indices, *before, *after]
        specs = [tf.TensorSpec(weight.shape, weight.dtype) for weight in values]
        for place in by_rows:
            weight = self._variables[place].value
            specs += [tf.TensorSpec([None, *weight.shape[1:]], weight.dtype), tf.TensorSpec([None], tf.int64)]
        results = iter(host_call(on_host, inputs, specs, name="tfdist_hogwild"))
        for place in whole:
            self._variables[place].assign(next(results))
        for place in by_rows:
            rows, row_ids = next(results), next(results)
            self._variables[place].value.scatter_update(tf.IndexedSlices(rows, row_ids))

    def refresh(self) -> None:
        """Reads all values; first, the chief gives servers what its program has assigned since the last reading."""
        if self._writers is None:
            return super().refresh()
        with self._lock, self._failing():
            known = self._writers
            writers = self._opened()
            if writers is None:
                raise TfdistError(
                    "a parameter server has come back where this worker cannot open its memory: on another machine, in "
                    "another container, or as another user. Hogwild() needs it where it was; start the worker again."
                )
            self._writers = writers
            if self._is_chief and all(own is other for own, other in zip(known, writers, strict=True)):
                self._give_assigned()
            self._changed_by_others()
            self._load()

    def _is_by_rows(self, place: int, gradient: Any) -> bool:
        """Returns whether an update by a gradient changes only some rows of a variable."""
        variable = self._variables[place]
        decays = optimizers.decays(self._optimizer, variable)
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return is_sparse and variable.constraint is None and keeps_other_values(self._optimizer, decays)

    def _rows(self, places: Sequence[int], indices: Sequence[Any]) -> list[Any]:
        return [
            tf.gather(self._variables[place].value, row_ids) for place, row_ids in zip(places, indices, strict=True)
        ]

    def _exchanged_rows(
        self,
        whole: Sequence[int],
        values: Sequence[np.ndarray],
        by_rows: Sequence[int],
        rows: Sequence[Sequence[np.ndarray]],
    ) -> list[np.ndarray]:
        """Adds the changes of an update to the servers' memory, and reads the newest values.

        Args:
            whole: places of the variables that may have changed as a whole.
            values: values of these variables after the update.
            by_rows: places of the variables of which only rows have changed.
            rows: for each variable in ``by_rows``, indices, and the rows before and after the update.

        Returns:
            The values of ``whole``, then for each variable in ``by_rows`` rows and their indices.
        """
        for place, value in zip(whole, values, strict=True):
            writer, number = self._place(place)
            writer.add(number, value - self._bases[place])
        touched = []
        for place, (indices, before, after) in zip(by_rows, rows, strict=True):
            distinct, first = np.unique(indices, return_index=True)
            writer, number = self._place(place)
            writer.add_rows(number, distinct, after[first] - before[first])
            touched.append(distinct)
        for writer in self._writers or ():
            writer.count()
        changed = self._changed_by_others()
        results = []
        for place in whole:
            self._bases[place] = self._values(place).copy()
            results.append(self._bases[place])
        for place, own_rows in zip(by_rows, touched, strict=True):
            news, array = changed[place], self._values(place)
            named = np.arange(len(array)) if news is None else np.union1d(own_rows, news)
            results += [array[named], named]
            if place in self._bases:
                base = self._bases[place] = self._bases[place].copy()  # a tensor may have the memory of the last one
                base[named] = results[-2]
        return results

    def _opened(self) -> list[Writer] | None:
        """Returns writers to the servers' memory as it is now; None if this process cannot open it."""
        known = {writer.memory.where: writer for writer in self._writers or ()}
        writers = []
        session = self._session
        answers = session.answers(lambda server, id: OpenMemory(id, *session.sender))
        for (answer, _), shapes in zip(answers, self._model.shapes, strict=True):
            if answer.where not in known:
                memory = Memory.open(answer.where, shapes)
                if memory is None:
                    return None
                known[answer.where] = Writer(memory, answer.place)
            writers.append(known[answer.where])
        return writers

    def _place(self, variable: int) -> tuple[Writer, int]:
        """Returns the writer to a variable, and the variable's number there."""
        assert self._writers is not None
        server, number = self._places[variable]
        return self._writers[server], number

    def _values(self, variable: int) -> np.ndarray:
        """Returns the memory of a variable, which other workers change."""
        writer, number = self._place(variable)
        return writer.memory.arrays[number]

    def _changed_by_others(self) -> dict[int, np.ndarray | None]:
        """Returns, by variable, the rows that others have changed since the last call; None for all of them."""
        changed: dict[int, np.ndarray | None] = {}
        for server, writer in enumerate(self._writers or ()):
            variables = {number: variable for variable, (at, number) in self._places.items() if at == server}
            changed |= {variables[number]: rows for number, rows in writer.changed_by_others(list(variables)).items()}
        return changed

    def _give_assigned(self) -> None:
        """Gives the servers what the chief's program has assigned, by `load_weights`, `set_weights` or a callback."""
        arrays = {place: array_of(variable) for place, variable in enumerate(self._variables)}
        theirs = [place for place in arrays if place not in self._bases]
        differ = {place: _different_rows(arrays[place], self._values(place)) for place in theirs}
        changed = self._changed_by_others()  # rows that others have changed differ for that reason
        for place, array in arrays.items():
            writer, number = self._place(place)
            if place in self._bases:
                if array.tobytes() != self._bases[place].tobytes():
                    writer.assign(number, array)
            elif (news := changed[place]) is not None and len(rows := np.setdiff1d(differ[place], news)):
                if array.ndim:
                    writer.assign_rows(number, rows, array[rows])
                else:
                    writer.assign(number, array)

    def _load(self) -> None:
        """Assigns the values in the servers' memory."""
        for place, variable in enumerate(self._variables):
            value = self._values(place).copy()
            variable.assign(value)
            if place in self._bases:
                self._bases[place] = value

    def _splits(self) -> bool:
        """Returns False: a variable is in the memory of one server."""
        return False

    def _state(self) -> TrainingState:
        """Returns the values in the servers' memory, also after the death of a server."""
        if self._writers is None:
            return super()._state()
        return TrainingState([self._values(place).copy() for place in range(len(self._variables))])


def _different_rows(array: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the indices of the rows in which two arrays differ; 0 for different scalars."""
    rows = max(1, len(array) if array.ndim else 1)
    return np.flatnonzero((array.reshape(rows, -1) != other.reshape(rows, -1)).any(axis=1))
