"""A Keras optimizer that updates some rows of large arrays, and their slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.tensors import to_array, to_tensor

_LEAST_ROWS = 64
_MOST_ELEMENTS = 1 << 19
"""Of a block, 2 MiB in float32: it stays in the cache between the optimizer's operations."""

_ALIGNMENT = 64

Initial = float | None
"""What a slot of a new row holds: a number, or None for the row's own initial value."""


class RowOptimizer:
    """Updates rows with a Keras optimizer, which sees no others.

    The rows of an update are gathered into blocks, variables of a power of two of rows, which the optimizer takes for
    the whole variable; then they are scattered back. There is one graph for each size of a block. What the rows of a
    block beyond the last one hold has no meaning, and no effect.

    So updates are *lazy*: slots of rows without a gradient do not decay, and weight decay acts on updated rows only.
    Where a zero gradient changes nothing (SGD without momentum, Adagrad, Ftrl) this equals an update of all rows.

    Args:
        optimizer: as `keras.optimizers.serialize` describes it.
        dim: number of columns of the rows.
        dtype: of rows and slots.

    Raises:
        ValueError: the optimizer does not treat each row on its own, or depends on updates that a row has no part in.
    """

    def __init__(self, optimizer: dict[str, Any], dim: int, dtype: np.dtype) -> None:
        self._config = optimizer
        self._shape = (dim,)
        self._dtype = dtype
        self._most = max(_LEAST_ROWS, 1 << (max(1, _MOST_ELEMENTS // dim).bit_length() - 1))
        self._blocks: dict[int, _Block] = {}
        _check_arguments(_deserialized(optimizer))
        block = self._block(_LEAST_ROWS)
        self.initial = block.initial
        self.slot_shapes = block.slot_shapes
        self.scalars = block.scalars()
        _check_rows_are_independent(block)
        buffers = [(dim,), (dim,), *self.slot_shapes]
        self._buffers = [_aligned((self._most, *shape), dtype) for shape in buffers]

    @property
    def iterations(self) -> int:
        """The number of updates."""
        return int(self.scalars[self._block(_LEAST_ROWS).iterations])

    @property
    def iterations_place(self) -> int:
        """The place of the number of updates in ``scalars``."""
        return self._block(_LEAST_ROWS).iterations

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate.

        Args:
            value: for all updates from now on.

        Raises:
            TypeError: it is set by a schedule.
        """
        block = self._block(_LEAST_ROWS)
        place = block.learning_rate
        if place >= 0 and self.scalars[place] == self.scalars[place].dtype.type(value):  # as in most steps
            return
        block.optimizer.learning_rate = np.float64(value)
        self.scalars[block.learning_rate] = block.scalars()[block.learning_rate]

    def update(self, columns: Sequence[np.ndarray], slots: np.ndarray, gradients: np.ndarray) -> None:
        """Makes one update, which counts also if it has no rows.

        Args:
            columns: the rows' values and their optimizer slots, [rows, …]; written in place.
            slots: of the rows to update, distinct.
            gradients: one row for each of them.
        """
        before = after = self.scalars
        for begin in range(0, max(1, len(slots)), self._most):
            part = slots[begin : begin + self._most]
            block = self._block(max(_LEAST_ROWS, 1 << max(0, len(part) - 1).bit_length()))
            gradient, *rows = (buffer[: block.rows] for buffer in self._buffers)
            gradient[: len(part)] = gradients[begin : begin + len(part)]
            for row, column in zip(rows, columns, strict=True):
                if len(part):  # NumPy takes nothing from a column without rows
                    np.take(column, part, axis=0, out=row[: len(part)], mode="clip")
            updated, after = block.step(gradient, rows, before)
            for column, row in zip(columns, updated, strict=True):
                if len(part):
                    _scatter(column, part, row[: len(part)])
        self.scalars = after

    def _block(self, rows: int) -> _Block:
        if rows not in self._blocks:
            self._blocks[rows] = _Block(self._config, (rows, *self._shape), self._dtype)
        return self._blocks[rows]


class _Block:
    """An optimizer that was built for a variable of some rows. It keeps nothing from one step to the next.

    Attributes:
        rows: of the variable.
        initial: of each slot.
        slot_shapes: the shape of each slot without rows.
        shape: of the variable.
        dtype: of the variable and its slots.
        iterations: the place of the number of updates among the scalars.
        learning_rate: the place of the learning rate among them; −1 with a schedule.
    """

    def __init__(self, config: dict[str, Any], shape: tuple[int, ...], dtype: np.dtype) -> None:
        with tf.device("CPU:0"):
            self.rows, self.shape, self.dtype = shape[0], shape, dtype
            self.optimizer = _deserialized(config)
            noise = np.random.default_rng(0).normal(size=shape).astype(dtype)
            variable = keras.Variable(noise, dtype=dtype.name, name="rows")
            self.optimizer.build([variable])
        scalars = [one for one in self.optimizer.variables if one.shape == ()]
        slots = [one for one in self.optimizer.variables if one.shape != ()]
        name = type(self.optimizer).__name__
        if wrong := [tuple(one.shape) for one in slots if one.shape[0] != self.rows]:
            raise ValueError(
                f"{name} keeps state of shape {wrong[0]} for a variable of shape {shape}: not one for each row. It "
                "cannot update an embedding by rows."
            )
        self.initial = [_initial(name, to_array(one.value.value()), noise) for one in slots]
        self.slot_shapes = [tuple(one.shape[1:]) for one in slots]
        self.iterations = next(place for place, one in enumerate(scalars) if one is self.optimizer.iterations)
        rate = self.optimizer.learning_rate
        self.learning_rate = next((place for place, one in enumerate(scalars) if one is rate), -1)
        self._variable = variable
        self._rows = [variable, *slots]
        self._scalars = scalars
        with tf.device("CPU:0"):
            specs = [tf.TensorSpec(one.shape, one.dtype) for one in (variable, *self._rows, *scalars)]
            self._step = tf.function(self._stepped, autograph=False).get_concrete_function(*specs)

    def new_slots(self, values: np.ndarray) -> list[np.ndarray]:
        """The slots of rows that were never updated.

        Args:
            values: of these rows, [n, …].
        """
        return [
            values.copy() if initial is None else np.full((len(values), *shape), initial, self.dtype)
            for initial, shape in zip(self.initial, self.slot_shapes, strict=True)
        ]

    def scalars(self) -> list[np.ndarray]:
        """The optimizer's variables that belong to no row."""
        return [np.array(to_array(one.value.value())) for one in self._scalars]

    def step(
        self, gradient: np.ndarray, rows: Sequence[np.ndarray], scalars: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """One step.

        Args:
            gradient: of all rows of the block.
            rows: their values and slots.
            scalars: before the step.

        Returns:
            Values and slots after the step, to be read before the next one; and the scalars.
        """
        with tf.device("CPU:0"):
            step = self._step if _graphs_have_a_thread() else self._stepped
            step(*map(to_tensor, (gradient, *rows)), *map(tf.constant, scalars))
            return [to_array(one.value.read_value()) for one in self._rows], self.scalars()

    def _stepped(self, gradient: Any, *state: Any) -> None:
        for variable, value in zip((*self._rows, *self._scalars), state, strict=True):
            variable.value.assign(value)
        self.optimizer.apply([gradient], [self._variable])


def _graphs_have_a_thread() -> bool:
    """Whether a graph can run inside a host call of another one, where a table is in the process that trains.

    The host call keeps one thread of TensorFlow's pool; the graph would wait for another one for ever.
    """
    chosen = tf.config.threading.get_inter_op_parallelism_threads()
    return int(chosen or os.environ.get("TF_NUM_INTEROP_THREADS") or len(os.sched_getaffinity(0))) != 1


def _deserialized(config: dict[str, Any]) -> Any:
    """The optimizer of a description.

    Raises:
        ValueError: Keras does not know it, as some versions do not know `keras.optimizers.Lamb`.
    """
    optimizer = keras.optimizers.deserialize(config)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        name = config.get("class_name")
        raise ValueError(f"Keras cannot make the optimizer {name} from its description; register it as serializable")
    return optimizer


def _initial(name: str, slot: np.ndarray, values: np.ndarray) -> Initial:
    """What a slot of a new row holds."""
    if slot.shape == values.shape and np.array_equal(slot, values):
        return None
    first = slot.reshape(-1)[:1]
    if not (slot == first).all():
        raise ValueError(f"{name} begins with slots that depend on the whole variable; expected one number or the row")
    return float(first[0])


def _check_arguments(optimizer: Any) -> None:
    """Refuses what rows that come and go cannot do.

    Raises:
        ValueError: it is asked for.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{name} skips a step if any gradient is not finite, of which a server sees some. Scale losses on the "
            "workers, and give its inner optimizer to the embedding."
        )
    for argument, why in (
        ("clipnorm", "the norm is that of the whole gradient, of which a server has some rows; clipvalue= can be used"),
        ("global_clipnorm", "the norm is that of all gradients, of which a server has some; clipvalue= can be used"),
        ("use_ema", "rows that are not updated would keep old averages"),
        ("gradient_accumulation_steps", "gradients of rows that the last of these steps does not touch would be late"),
    ):
        if getattr(optimizer, argument, None):
            raise ValueError(f"{name}({argument}=…) cannot be used for an embedding on parameter servers: {why}")


def _check_rows_are_independent(block: _Block) -> None:
    """Compares two steps that differ in one half of the rows, early and late in training.

    Raises:
        ValueError: the other half differs, too.
    """
    generator = np.random.default_rng(1)
    half = block.rows // 2
    for iterations in (0, 1000):
        scalars = block.scalars()
        scalars[block.iterations] = np.asarray(iterations, scalars[block.iterations].dtype)
        results = []
        gradient, values = (generator.normal(size=block.shape).astype(block.dtype) for _ in range(2))
        for factor in (1, 100):
            gradient[half:] *= factor
            values[half:] *= factor
            updated, _ = block.step(gradient, [values, *block.new_slots(values)], scalars)
            results.append([row[:half].copy() for row in updated])
        if not all(np.array_equal(one, other, equal_nan=True) for one, other in zip(*results, strict=True)):
            raise ValueError(
                f"{type(block.optimizer).__name__} cannot be used for an embedding on parameter servers: its update of "
                "a row depends on other rows. Use one that works on each element, such as Adagrad or Adam."
            )


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of zeros that TensorFlow can use in place."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def _scatter(column: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
    """``column[slots] = rows``, in two thirds of the time: NumPy copies each row as one element."""
    row_type = np.dtype((np.void, column[:1].nbytes))
    column.reshape(len(column), -1).view(row_type)[:, 0][slots] = rows.reshape(len(rows), -1).view(row_type)[:, 0]
