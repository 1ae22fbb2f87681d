"""An embedding without a fixed size: rows for any int64 key, with the Keras optimizer that updates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import whole_numbers
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.key_hash import server_of
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.shard.row_optimizer import RowOptimizer
from tfdist.parameter_server.tables.keyed_rows import KeyedRows
from tfdist.tensors import to_array

State = dict[str, np.ndarray]
"""State of a table, or of one server's part of it, as arrays by name; see `EmbeddingTable.state`."""

_USES = {"uses": ((), np.int64), "last_used": ((), np.int64)}


class EmbeddingTable:
    """The rows of an embedding that one server holds, used by one thread.

    A row is made by the first lookup of training that contains its key, or by a later lookup as the policy says. *The
    lookup of a key without a row returns the row that the key would get*: its initial value, which depends on the seed
    and the key only. So lookups return the same with and without ``create``, predictions change nothing, and the order
    in which workers see keys does not matter. Gradients of keys without a row are dropped: keys that are not admitted
    yet, and rows that were evicted between a worker's lookup and its update.

    Args:
        dim: number of columns.
        optimizer: optimizer serialized by `keras.optimizers.serialize`; `RowOptimizer` says which are refused.
        initial: initial values of rows; None takes `InitialRows` with its defaults.
        policy: policy that says which keys get a row and when rows are evicted; None takes `RowPolicy` with its
            defaults.
        dtype: dtype of the rows, float32 or float64.

    Attributes:
        dropped: the number of keys in updates whose gradients were dropped since this object was made.

    Raises:
        ValueError: ``dim``, ``dtype`` or the optimizer cannot be used.
    """

    def __init__(
        self,
        dim: int,
        optimizer: dict[str, Any],
        initial: InitialRows | None = None,
        policy: RowPolicy | None = None,
        dtype: str = "float32",
    ) -> None:
        whole_numbers.check("dim", dim)
        if dtype not in ("float32", "float64"):
            raise ValueError(f'dtype must be "float32" or "float64"; got {dtype!r}')
        self.dropped = 0
        self._dim = dim
        self._dtype = np.dtype(dtype)
        self._initial = initial or InitialRows()
        self._policy = policy or RowPolicy()
        self._use_optimizer(optimizer)
        self._clear()

    def _use_optimizer(self, optimizer: dict[str, Any]) -> None:
        self._optimizer = RowOptimizer(optimizer, self._dim, self._dtype)
        self._slots = {f"slot{place}": shape for place, shape in enumerate(self._optimizer.slot_shapes)}

    def _clear(self) -> None:
        columns = {"values": ((self._dim,), self._dtype)} | {
            name: (shape, self._dtype) for name, shape in self._slots.items()
        }
        self._rows = KeyedRows(columns | _USES)
        self._waiting = KeyedRows(_USES)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """The number of keys that have been used, but have no row yet."""
        return len(self._waiting)

    @property
    def iterations(self) -> int:
        """The number of updates."""
        return self._optimizer.iterations

    def set_learning_rate(self, value: float) -> None:
        """Sets the optimizer's learning rate.

        Args:
            value: learning rate of all later updates.

        Raises:
            TypeError: a schedule sets the learning rate.
        """
        self._optimizer.set_learning_rate(value)

    def set_optimizer(self, optimizer: dict[str, Any]) -> None:
        """Replaces the optimizer. Rows stay; slots and iterations begin anew.

        Args:
            optimizer: optimizer serialized by `keras.optimizers.serialize`.

        Raises:
            ValueError: the optimizer cannot be used. The table is as before.
        """
        before = self.iterations
        self._use_optimizer(optimizer)
        rows, waiting = self._rows, self._waiting
        self._clear()
        self._waiting = waiting
        self._waiting["last_used"][:] -= before
        uses = {"uses": rows["uses"], "last_used": rows["last_used"] - before}
        self._add(rows.keys, rows["values"], uses)

    def assign(self, keys: np.ndarray, values: np.ndarray, is_whole: bool = False) -> None:
        """Assigns the rows of keys, or makes them. Their slots begin anew. The policy admits all of the keys.

        Args:
            keys: keys, int64 [n], distinct.
            values: values of the rows, [n, dim].
            is_whole: whether all other rows are removed.

        Raises:
            TypeError: the keys are not int64.
            ValueError: keys or values have another shape, keys repeat, or there are more than the policy allows. The
                table is as before.
        """
        _check_keys(keys)
        if values.shape != (len(keys), self._dim):
            raise ValueError(f"values of shape {values.shape} for {len(keys)} keys of {self._dim} columns")
        if len(np.unique(keys)) < len(keys):
            raise ValueError("keys repeat; expected each once")
        most = self._policy.max_rows
        if most is not None and len(keys) > most:
            raise ValueError(f"{len(keys)} keys for a table of at most {most} rows on each server")
        if is_whole:
            self._clear()
        else:
            slots = self._rows.find(keys)
            self._rows.remove(slots[slots >= 0])
        waiting = self._waiting.find(keys)
        self._waiting.remove(waiting[waiting >= 0])
        self._make_room(self._rows, len(keys), np.empty(0, np.int64))
        self._add(keys, values.astype(self._dtype, copy=False), {"uses": 1, "last_used": self.iterations})

    def _add(self, keys: np.ndarray, values: np.ndarray, uses: Mapping[str, Any]) -> None:
        """Adds rows, with the slots of rows that were never updated."""
        slots = {
            name: values if initial is None else initial
            for name, initial in zip(self._slots, self._optimizer.initial, strict=True)
        }
        self._rows.add(keys, {"values": values, **uses, **slots})

    def lookup(self, keys: np.ndarray, create: bool) -> np.ndarray:
        """Returns the rows of keys.

        Args:
            keys: keys, int64 [n]; they may repeat.
            create: whether this is a use of the keys, which makes rows; True in training.

        Returns:
            A new array [n, dim].

        Raises:
            TypeError: the keys are not int64.
            ValueError: the keys have another shape.
        """
        _check_keys(keys)
        slots = self._rows.find(keys)
        if create and self._use(keys, slots):
            slots = self._rows.find(keys)
        if not len(self):
            return self._initial.rows(keys, self._dim, self._dtype)
        rows = np.take(self._rows["values"], slots, axis=0, mode="clip")
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            rows[missing] = self._initial.rows(keys[missing], self._dim, self._dtype)
        return rows

    def update(self, keys: np.ndarray, gradients: np.ndarray, create: bool = False) -> int:
        """Makes one step of the optimizer on the rows of keys.

        An update counts in the optimizer's iterations, and as time for the policy, even without keys. If each training
        step updates every server, the iterations of all servers are equal, and the result is the same for any number
        of servers.

        Args:
            keys: keys, int64 [n]; the gradients of repeated keys are summed.
            gradients: gradients of the rows, [n, dim].
            create: whether this is a use of the keys, which makes rows, as their lookup was not.

        Returns:
            The number of rows that were updated.

        Raises:
            TypeError: the keys are not int64.
            ValueError: keys or gradients have another shape.
        """
        self.check(keys, gradients)
        slots = self._rows.find(keys)
        if create and self._use(keys, slots):
            slots = self._rows.find(keys)
        is_here = slots >= 0
        if not is_here.all():
            slots, gradients = slots[is_here], gradients[is_here]
            self.dropped += len(keys) - len(slots)
        slots, gradients = _summed(slots, gradients.astype(self._dtype, copy=False))
        columns = [self._rows[name] for name in ("values", *self._slots)]
        self._optimizer.update(columns, slots, gradients)
        now = self.iterations
        self._rows["last_used"][slots] = now
        if self._policy.is_time_to_search(now):
            for rows in (self._rows, self._waiting):
                self._evict(rows, self._policy.expired(rows["last_used"], now))
        return len(slots)

    def check(self, keys: np.ndarray, gradients: np.ndarray) -> None:
        """Raises the same errors as `update` for arguments that cannot be used.

        Args:
            keys: keys, int64 [n].
            gradients: gradients of the rows, [n, dim].

        Raises:
            TypeError: the keys are not int64.
            ValueError: keys or gradients have another shape.
        """
        _check_keys(keys)
        if gradients.shape != (len(keys), self._dim):
            raise ValueError(f"gradients of shape {gradients.shape} for {len(keys)} keys of {self._dim} columns")

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns copies of all rows.

        Returns:
            The keys in ascending order, int64 [rows], and their values [rows, dim].
        """
        order = np.argsort(self._rows.keys)
        return self._rows.keys[order], self._rows["values"][order]

    def state(self) -> State:
        """Returns the whole state, as arrays that later updates do not change.

        Returns:
            Arrays by name: ``keys`` int64 [rows], in no order; for each key its ``values`` [rows, dim], the optimizer's
            ``slot0``, …, ``uses``, and ``ages`` (updates since the last use); ``waiting_keys``, ``waiting_uses`` and
            ``waiting_ages`` of keys without a row; and the optimizer's variables that belong to no row, ``scalar0``, …
        """
        state: State = {f"scalar{place}": np.array(scalar) for place, scalar in enumerate(self._optimizer.scalars)}
        for prefix, rows in (("", self._rows), ("waiting_", self._waiting)):
            state[f"{prefix}keys"] = rows.keys.copy()
            for name in rows.columns:
                if name == "last_used":
                    state[f"{prefix}ages"] = self.iterations - rows[name]
                else:
                    state[f"{prefix}{name}"] = rows[name].copy()
        return state

    def restore(self, states: Sequence[Mapping[str, np.ndarray]], server: int = 0, servers: int = 1) -> None:
        """Replaces the whole state by this server's share of a snapshot, which any number of servers may have made.

        Args:
            states: result of `state` of every server of the snapshot.
            server: index of this server.
            servers: number of servers now; `server_of` tells which keys belong to this server.

        Raises:
            ValueError: the snapshot is of another embedding or another optimizer, or has a key twice. The table is as
                before, or empty if a key occurs twice.
        """
        if not states:
            raise ValueError("a snapshot of an embedding needs the state of one server at least; got none")
        expected = {name: (array.dtype, array.shape[1:]) for name, array in self.state().items()}
        for state in states:
            actual = {name: (array.dtype, array.shape[1:]) for name, array in state.items()}
            if actual != expected:
                wrong = sorted(
                    name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)
                )
                raise ValueError(
                    f"the snapshot is of another embedding or optimizer: {wrong[0]} is "
                    f"{_described(actual.get(wrong[0]))}; expected {_described(expected.get(wrong[0]))}"
                )
        newest = max(states, key=lambda state: int(state[f"scalar{self._optimizer.iterations_place}"]))
        self._clear()
        self._optimizer.scalars = [np.array(newest[f"scalar{place}"]) for place in range(len(self._optimizer.scalars))]
        for prefix, rows in (("", self._rows), ("waiting_", self._waiting)):
            if rows is self._waiting and self._policy.admit_after == 1:
                continue
            for state in states:
                self._restore_rows(rows, state, prefix, server_of(state[f"{prefix}keys"], servers) == server)
            self._make_room(rows, 0, np.empty(0, np.int64))

    def _restore_rows(self, rows: KeyedRows, state: Mapping[str, np.ndarray], prefix: str, is_here: np.ndarray) -> None:
        keys = state[f"{prefix}keys"][is_here]
        if len(np.unique(keys)) < len(keys) or (rows.find(keys) >= 0).any():
            self._clear()
            raise ValueError("the snapshot has a key twice: its parts must be of one table at one time")
        values = {name: state[f"{prefix}{name}"][is_here] for name in rows.columns if name != "last_used"}
        rows.add(keys, values | {"last_used": self.iterations - state[f"{prefix}ages"][is_here]})

    def _use(self, keys: np.ndarray, slots: np.ndarray) -> bool:
        """Counts a use of keys, and makes rows for admitted keys. Returns whether slots may have changed."""
        is_here = slots >= 0
        used = slots[is_here]
        self._rows["uses"][used] += 1  # a repeated key counts once
        self._rows["last_used"][used] = self.iterations
        if len(used) == len(slots):
            return False
        new = np.unique(keys[~is_here])
        uses = np.ones(len(new), np.int64)
        if self._policy.admit_after > 1:
            uses = self._wait(new)
            is_admitted = uses >= self._policy.admit_after
            new, uses = new[is_admitted], uses[is_admitted]
        number = self._make_room(self._rows, len(new), used)
        new, uses = new[:number], uses[:number]
        if self._policy.admit_after > 1:
            self._waiting.remove(self._waiting.find(new))
        values = self._initial.rows(new, self._dim, self._dtype)
        self._add(new, values, {"uses": uses, "last_used": self.iterations})
        return True

    def _wait(self, keys: np.ndarray) -> np.ndarray:
        """Counts a use of distinct keys that have no row. Returns each key's number of uses so far."""
        places = self._waiting.find(keys)
        is_known = places >= 0
        known, new = places[is_known], keys[~is_known]
        self._waiting["uses"][known] += 1
        self._waiting["last_used"][known] = self.iterations
        uses = np.ones(len(keys), np.int64)
        uses[is_known] = self._waiting["uses"][known]
        number = self._make_room(self._waiting, len(new), known)
        self._waiting.add(new[:number], {"uses": 1, "last_used": self.iterations})
        return uses

    def _make_room(self, rows: KeyedRows, new: int, kept: np.ndarray) -> int:
        """Evicts rows for new ones, except those in the ``kept`` slots. Returns how many new rows there is room for."""
        self._evict(rows, self._policy.surplus(rows.keys, rows["uses"], rows["last_used"], new, kept))
        most = self._policy.max_rows
        return new if most is None else min(new, most - len(rows))

    def _evict(self, rows: KeyedRows, slots: np.ndarray) -> None:
        if len(slots):
            rows.remove(slots)


def _summed(slots: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns distinct slots, and for each the sum of its gradients, added in their given order."""
    ascending = np.sort(slots)
    if not (ascending[1:] == ascending[:-1]).any():
        return slots, gradients
    order = np.argsort(slots, kind="stable")
    ascending = slots[order]
    is_first = np.concatenate([[True], ascending[1:] != ascending[:-1]])
    sums = tf.math.segment_sum(gradients.take(order, axis=0), np.cumsum(is_first) - 1)
    return ascending[is_first], to_array(sums)


def _described(array: tuple[np.dtype, tuple[int, ...]] | None) -> str:
    return "missing" if array is None else f"{array[0]} with rows of shape {array[1]}"


def _check_keys(keys: np.ndarray) -> None:
    if keys.dtype != np.int64:
        raise TypeError(f"keys must be int64; got {keys.dtype}")
    if keys.ndim != 1:
        raise ValueError(f"keys must have one dimension; got the shape {keys.shape}")
