"""Updates some rows of large arrays, and the rows' slots, with a Keras optimizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.parameter_server.shard.serialized_optimizers import deserialized
from tfdist.tensors import to_array, to_tensor
from tfdist.thread_values import ThreadValue

_LEAST_ROWS = 64
_MOST_ELEMENTS = 1 << 19
"""The most elements of a block: 2 MiB in float32, which stay in the cache between the optimizer's operations."""

_ALIGNMENT = 64

Initial = float | None
"""Initial value of a slot of a new row: a number, or None for the row's own initial value."""


class RowOptimizer:
    """A Keras optimizer that is run on the updated rows only.

    The rows of an update are gathered into blocks, variables whose number of rows is a power of two. The optimizer
    takes a block for the whole variable; then the rows are scattered back. There is one graph for each block size.
    Rows that pad a block have no effect.

    So updates are *lazy*: slots of rows without a gradient do not decay, and weight decay acts on updated rows only.
    Where a zero gradient changes nothing (SGD without momentum, Adagrad, Ftrl) this equals an update of all rows.

    Args:
        optimizer: the optimizer, serialized by `keras.optimizers.serialize`.
        dim: number of columns of the rows.
        dtype: dtype of rows and slots.

    Attributes:
        initial: initial value of each slot of a new row; None for the row's own initial value.
        slot_shapes: shape of each slot, without the dimension of the rows.
        scalars: current values of the optimizer's scalars.

    Raises:
        ValueError: the optimizer does not treat each row on its own, or depends on updates that lack the row.
    """

    def __init__(self, optimizer: dict[str, Any], dim: int, dtype: np.dtype) -> None:
        self._config = optimizer
        self._shape = (dim,)
        self._dtype = dtype
        self._most = max(_LEAST_ROWS, 1 << (max(1, _MOST_ELEMENTS // dim).bit_length() - 1))
        self._blocks: dict[int, _Block] = {}
        _check_arguments(deserialized(optimizer))
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
        """Index of the number of updates in ``scalars``."""
        return self._block(_LEAST_ROWS).iterations

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate.

        Args:
            value: learning rate of all later updates.

        Raises:
            TypeError: a schedule sets the learning rate.
        """
        block = self._block(_LEAST_ROWS)
        place = block.learning_rate
        if place >= 0 and self.scalars[place] == self.scalars[place].dtype.type(value):  # as in most steps
            return
        block.optimizer.learning_rate = np.float64(value)
        self.scalars[block.learning_rate] = block.scalars()[block.learning_rate]

    def update(self, columns: Sequence[np.ndarray], slots: np.ndarray, gradients: np.ndarray) -> None:
        """Makes one update. It counts even if it has no rows.

        Args:
            columns: values and optimizer slots of all rows, [rows, …]; written in place.
            slots: distinct indices of the rows to update.
            gradients: gradient of each of these rows.
        """
        before = after = self.scalars
        for begin in range(0, max(1, len(slots)), self._most):
            part = slots[begin : begin + self._most]
            block = self._block(max(_LEAST_ROWS, 1 << max(0, len(part) - 1).bit_length()))
            gradient, *rows = (buffer[: block.rows] for buffer in self._buffers)
            gradient[: len(part)] = gradients[begin : begin + len(part)]
            for row, column in zip(rows, columns, strict=True):
                if len(part):  # NumPy refuses to take from a column without rows
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
    """An optimizer built for a variable of a fixed number of rows. It keeps no state between steps.

    Attributes:
        rows: number of rows of the variable.
        initial: initial value of each slot of a new row; None for the row's own initial value.
        slot_shapes: shape of each slot, without the dimension of the rows.
        shape: shape of the variable.
        dtype: dtype of the variable and its slots.
        iterations: index of the number of updates among the scalars.
        learning_rate: index of the learning rate among the scalars; −1 with a schedule.
    """

    def __init__(self, config: dict[str, Any], shape: tuple[int, ...], dtype: np.dtype) -> None:
        with tf.device("CPU:0"):
            self.rows, self.shape, self.dtype = shape[0], shape, dtype
            self.optimizer = deserialized(config)
            noise = np.random.default_rng(0).normal(size=shape).astype(dtype)
            variable = keras.Variable(noise, dtype=dtype.name, name="rows")
            self.optimizer.build([variable])
        scalars = [keras_variable for keras_variable in self.optimizer.variables if keras_variable.shape == ()]
        slots = [keras_variable for keras_variable in self.optimizer.variables if keras_variable.shape != ()]
        name = type(self.optimizer).__name__
        if wrong := [tuple(keras_variable.shape) for keras_variable in slots if keras_variable.shape[0] != self.rows]:
            raise ValueError(
                f"{name} keeps state of shape {wrong[0]} for a variable of shape {shape}, which is not one entry "
                "for each row: it cannot update single rows of an embedding"
            )
        self.initial = [_initial(name, to_array(keras_variable.value.value()), noise) for keras_variable in slots]
        self.slot_shapes = [tuple(keras_variable.shape[1:]) for keras_variable in slots]
        self.iterations = next(
            place for place, keras_variable in enumerate(scalars) if keras_variable is self.optimizer.iterations
        )
        rate = self.optimizer.learning_rate
        self.learning_rate = next((place for place, keras_variable in enumerate(scalars) if keras_variable is rate), -1)
        self._variable = variable
        self._rows = [variable, *slots]
        self._scalars = scalars
        with tf.device("CPU:0"):
            specs = [
                tf.TensorSpec(keras_variable.shape, keras_variable.dtype)
                for keras_variable in (variable, *self._rows, *scalars)
            ]
            self._step = tf.function(self._stepped, autograph=False).get_concrete_function(*specs)

    def new_slots(self, values: np.ndarray) -> list[np.ndarray]:
        """Returns the slots of rows that were never updated.

        Args:
            values: values of the rows, [n, …].
        """
        return [
            values.copy() if initial is None else np.full((len(values), *shape), initial, self.dtype)
            for initial, shape in zip(self.initial, self.slot_shapes, strict=True)
        ]

    def scalars(self) -> list[np.ndarray]:
        """Returns the values of the optimizer's variables that belong to no row."""
        return [np.array(to_array(scalar.value.value())) for scalar in self._scalars]

    def step(
        self, gradient: np.ndarray, rows: Sequence[np.ndarray], scalars: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Makes one step on a block of rows.

        Args:
            gradient: gradients of all rows of the block.
            rows: values and slots of the rows.
            scalars: values of the optimizer's scalars before the step.

        Returns:
            Values and slots after the step, valid until the next step; and the scalars.
        """
        with tf.device("CPU:0"):
            step = self._step if _graphs_have_a_thread() else self._stepped
            step(*map(to_tensor, (gradient, *rows)), *map(tf.constant, scalars))
            return [to_array(variable.value.read_value()) for variable in self._rows], self.scalars()

    def _stepped(self, gradient: Any, *state: Any) -> None:
        for variable, value in zip((*self._rows, *self._scalars), state, strict=True):
            variable.value.assign(value)
        self.optimizer.apply([gradient], [self._variable])


within_graph = ThreadValue(False)
"""Whether a graph may have called this thread, as where a table is in the training process."""


def _graphs_have_a_thread() -> bool:
    """Returns whether a graph can run now. If a graph has called this thread, that occupies one of TensorFlow's."""
    if not within_graph.value:
        return True
    chosen = tf.config.threading.get_inter_op_parallelism_threads()
    return int(chosen or os.environ.get("TF_NUM_INTEROP_THREADS") or len(os.sched_getaffinity(0))) != 1


def _initial(name: str, slot: np.ndarray, values: np.ndarray) -> Initial:
    """Returns the initial value of a slot of a new row."""
    if slot.shape == values.shape and np.array_equal(slot, values):
        return None
    first = slot.reshape(-1)[:1]
    if not (slot == first).all():
        raise ValueError(
            f"{name} computes the first values of slots from the whole variable; expected one number, or the values of "
            "the row"
        )
    return float(first[0])


def _check_arguments(optimizer: Any) -> None:
    """Refuses options of an optimizer that do not work on single rows.

    Raises:
        ValueError: the optimizer has such an option.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{name} skips a step if any gradient is not finite, but a server sees only some gradients: scale losses "
            "on the workers, and give its inner optimizer to the embedding"
        )
    for argument, why in (
        ("clipnorm", "it needs the norm of the whole gradient, and a server has only some rows; use clipvalue="),
        ("global_clipnorm", "it needs the norm of all gradients, and a server has only some; use clipvalue="),
        ("use_ema", "rows that are not updated would keep old averages"),
        ("gradient_accumulation_steps", "gradients of rows that the last of these steps does not touch would be late"),
    ):
        if getattr(optimizer, argument, None):
            raise ValueError(f"{name}({argument}=…) cannot be used for an embedding on parameter servers: {why}")


def _check_rows_are_independent(block: _Block) -> None:
    """Compares two steps whose inputs differ in one half of the rows, early and late in training.

    Raises:
        ValueError: the results of the other half differ, too.
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
    """Returns an array of zeros, aligned so that TensorFlow can use it without a copy."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def _scatter(column: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> None:
    """Assigns ``column[slots] = rows``, in two thirds of the time: NumPy copies each row as one element."""
    row_type = np.dtype((np.void, column[:1].nbytes))
    column.reshape(len(column), -1).view(row_type)[:, 0][slots] = rows.reshape(len(rows), -1).view(row_type)[:, 0]
