"""The values of a shard, and the Keras optimizer that updates them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.parameter_server.protocol.changes import Changes, Edition
from tfdist.parameter_server.protocol.gradients import Kind, PushedGradients, Shapes
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.shard import slots as slots_of
from tfdist.parameter_server.shard.lazy_rows import LazyRows
from tfdist.parameter_server.shard.private_values import PrivateValues
from tfdist.parameter_server.shard.row_local import keeps_other_rows, keeps_other_values
from tfdist.parameter_server.shard.serialized_optimizers import deserialized
from tfdist.private import optimizers
from tfdist.private.tensorflow import call_of, tensor_of
from tfdist.tensors import to_array

_ITERATIONS = -1
"""Stands for the optimizer's iteration counter in place of the number of a block."""


def is_elementwise(optimizer: Any) -> bool:
    """Returns whether each element's update depends on this element alone, so that variables may be split and joined.

    Args:
        optimizer: a Keras optimizer. Optimizers that clip by a norm are not elementwise.
    """
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    return optimizers.updates_elements_apart(optimizer) and not clips


@dataclass(frozen=True)
class _RowBlock:
    """Variables that the optimizer updates as one Keras variable.

    Attributes:
        places: indices of the variables, which follow each other in a vector.
        variable: the Keras variable: a vector, or of the variable's own shape if there is one only.
    """

    places: tuple[int, ...]
    variable: Any


_Cut = tuple[int, slice, tuple[int, ...]]
"""The part of a vector that is a block's dense gradient: index of the vector, elements, and the block's shape."""


@dataclass(frozen=True)
class _Plan:
    """How gradients of some kinds are applied.

    Attributes:
        lazily: numbers of the blocks of which only the named rows are updated.
        cuts: for each other block with a gradient, where a dense one is, or the variable with a sparse one.
        whole: indices of the variables that change as a whole.
        by_rows: indices of the variables of which the named rows change.
        call: makes the update of the blocks in ``cuts``; returns new values by block number. None without such blocks.
    """

    lazily: list[int]
    cuts: list[_Cut | int]
    whole: list[int]
    by_rows: list[int]
    call: Callable[[Sequence[Any]], dict[int, Any]] | None

    def given(self, gradients: PushedGradients) -> list[Any]:
        """Returns the tensors for ``call``."""
        tensors = []
        for cut in self.cuts:
            if isinstance(cut, int):
                rows, indices = gradients.sparse[cut]
                tensors += [tensor_of(rows), tensor_of(np.asarray(indices, np.int64))]
            else:
                vector, elements, shape = cut
                tensors.append(tensor_of(gradients.vectors[vector][elements].reshape(shape)))
        return tensors


class Store(PrivateValues):
    """A shard's variables with their optimizer.

    The optimizer's slots, its iterations, weight decay and averages live here, with one writer. Updating several small
    variables costs many times as much as updating one vector of all their elements, so variables are joined into
    vectors where the optimizer allows it. A variable is separated when it gets a sparse gradient, or when it gets none
    while others of its vector do.

    Args:
        held: descriptions of the variables.
        state: first values of the variables; also slots and scalars, if the optimizer has made updates before.
        optimizer: the optimizer, serialized by `keras.saving.serialize_keras_object`.
        is_lazy: whether a sparse gradient updates only the rows that it names (`LazyRows`).

    Attributes:
        held: descriptions of the variables.
        config: the serialized optimizer.

    Raises:
        ValueError: the optimizer cannot update rows lazily.
    """

    def __init__(
        self, held: Sequence[HeldRows], state: TrainingState, optimizer: dict[str, Any], is_lazy: bool = False
    ) -> None:
        self.held = list(held)
        self.config = optimizer
        self.shapes = Shapes([value.shape for value in state.values], [value.dtype for value in state.values])
        self._all_dense: tuple[Kind, ...] = tuple("dense" for _ in held)
        self._changes = Changes(self.shapes.shapes, [dtype.itemsize for dtype in self.shapes.dtypes])
        self._apart: set[int] = {place for place, part in enumerate(held) if part.constraint is not None}
        self._rate: float | None = None
        self._lazy: LazyRows | None = None
        self._make(state)
        if is_lazy and not keeps_other_rows(self._optimizer):
            self._lazy = LazyRows(optimizer)

    @property
    def iterations(self) -> int:
        """The number of updates so far."""
        return int(self._read(_ITERATIONS))

    def vectors(self, kinds: Sequence[Kind] | None = None) -> list[np.ndarray]:
        """Returns the values, in the layout for some kinds of gradients. Later updates do not change them.

        Args:
            kinds: kind of each variable's gradient; all are dense by default.
        """
        return self._in_vectors(lambda number: to_array(self._read(number)), kinds)

    @property
    def edition(self) -> Edition:
        """The edition of the current values; see `Changes`."""
        return self._changes.edition

    def since(self, edition: Edition | None = None, places: Collection[int] = ()) -> PushedGradients:
        """Returns the values; of variables of which few rows have changed, only those rows.

        Args:
            edition: edition that the receiver has; None returns all values.
            places: indices of the variables of which single rows may be returned.
        """
        if edition is None or not places:
            return PushedGradients(self._all_dense, self.vectors(self._all_dense))
        changed = self._changes.since(edition)
        rows = {place: indices for place, indices in changed.items() if place in places}
        kinds: tuple[Kind, ...] = tuple("sparse" if place in rows else "dense" for place in range(len(self.held)))
        sparse = {}
        for block in self._blocks:
            if (place := block.places[0]) in rows:
                sparse[place] = (to_array(tf.gather(block.variable.value, rows[place])), rows[place])
        ordered = {place: sparse[place] for place in sorted(sparse)}
        return PushedGradients(kinds, self.vectors(kinds), ordered)

    def averages(self) -> list[np.ndarray] | None:
        """Returns the moving averages of the values, in the layout of `vectors`; None if the optimizer keeps none."""
        averages = {slot.variable: slot.value for slot in self._slots if slot.name == "average"}
        if not averages:
            return None
        return self._in_vectors(lambda number: to_array(averages[number].value.read_value()))

    def state(self) -> TrainingState:
        """Returns the values and the optimizer's variables. Later updates do not change them."""
        values = list(self.shapes.layout().arrays(self.vectors()).values())
        slots: list[dict[str, np.ndarray]] = [{} for _ in self.held]
        for slot in self._slots:
            block, array = self._blocks[slot.variable], to_array(slot.value.value.read_value())
            for place, part in zip(block.places, self._split(block, array), strict=True):
                slots[place][slot.name] = part
        scalars = slots_of.scalars_of(self._optimizer, self._slots)
        return TrainingState(values, slots, {name: np.array(scalar.numpy()) for name, scalar in scalars.items()})

    def set_learning_rate(self, value: float) -> None:
        """Sets the optimizer's learning rate.

        Args:
            value: the chief's learning rate.

        Raises:
            TypeError: a schedule sets the learning rate.
        """
        if value != self._rate:
            self._optimizer.learning_rate = np.float64(value)
            self._rate = value

    def assign(self, vectors: Sequence[np.ndarray]) -> None:
        """Assigns values; slots and iterations stay as they are.

        Args:
            vectors: values in the layout of all variables.

        Raises:
            ValueError: the vectors do not fit the variables.
        """
        layout = self.shapes.layout()
        layout.check(vectors)
        self._changes.note(range(len(self.held)), {})
        self._newest.clear()
        for block in self._blocks:
            first, last = layout.spans[block.places[0]], layout.spans[block.places[-1]]
            block.variable.assign(vectors[first.vector][first.begin : last.end].reshape(block.variable.shape))

    def update(self, gradients: PushedGradients) -> None:
        """Makes one update. It counts even if all gradients are missing, as other servers may have some.

        Args:
            gradients: gradients of the shard's variables.
        """
        plan = self._plans.get(gradients.kinds) or self._planned(gradients.kinds)
        self._changes.note(plan.whole, {place: gradients.sparse[place][1] for place in plan.by_rows})
        self._newest.clear()  # TensorFlow copies a value that is still referenced, instead of writing to it
        scalars = self._update_lazily(plan.lazily, gradients)
        if plan.call is not None:
            self._newest |= plan.call(plan.given(gradients))
        elif scalars:
            for variable, value in scalars:
                variable.assign(value)
        else:
            optimizers.apply_count(self._optimizer).assign_add(1)

    def _is_lazy(self, place: int) -> bool:
        """Returns whether a sparse gradient of a variable updates only the rows that it names."""
        held = self.held[place]
        return self._lazy is not None and held.constraint is None and not keeps_other_rows(self._optimizer, held.decays)

    def _update_lazily(self, numbers: Sequence[int], gradients: PushedGradients) -> list[tuple[Any, np.ndarray]]:
        """Updates only the named rows of some blocks.

        Returns:
            The optimizer's scalars, each with its value after the update.
        """
        if not numbers:
            return []
        assert self._lazy is not None
        scalars = slots_of.scalars_of(self._optimizer, self._slots)
        for number in numbers:
            block, place = self._blocks[number], self._blocks[number].places[0]
            slots = [slot.value for slot in self._slots if slot.variable == number]
            variables, decays = [block.variable, *slots], self.held[place].decays
            after = self._lazy.update(variables, gradients.sparse[place], scalars, decays)
        return list(zip(scalars.values(), after, strict=True))

    def _read(self, number: int) -> Any:
        """Returns the value of a block, or the iterations. A later write to the variable leaves the value as it is."""
        if number not in self._newest:
            self._newest[number] = self._variables(number).value.read_value()
        return self._newest[number]

    def _variables(self, number: int) -> Any:
        return optimizers.apply_count(self._optimizer) if number == _ITERATIONS else self._blocks[number].variable

    def _planned(self, kinds: tuple[Kind, ...]) -> _Plan:
        """Returns how gradients of some kinds are applied. To find it takes longer than to do it."""
        odd = [place for place, kind in enumerate(kinds) if kind != "dense"]
        mixed = [block for block in self._blocks if len(block.places) > 1 and not set(block.places).isdisjoint(odd)]
        if any(_kind(kinds, block) is None for block in mixed):
            self._separate({place for block in mixed for place in block.places if place in odd})
        of_blocks = [_kind(kinds, block) or "none" for block in self._blocks]
        lazily = [
            number
            for number, (kind, block) in enumerate(zip(of_blocks, self._blocks, strict=True))
            if kind == "sparse" and self._is_lazy(block.places[0])
        ]
        for number in lazily:
            of_blocks[number] = "none"
        by_rows = {*lazily, *(number for number, kind in enumerate(of_blocks) if kind == "sparse")}
        if not by_rows <= self._by_rows:
            self._by_rows |= by_rows
            self._plans.clear()  # they read what is read on demand from now on
            self._calls.clear()
        layout = self.shapes.layout(kinds)
        cuts: list[_Cut | int] = []
        for kind, block in zip(of_blocks, self._blocks, strict=True):
            if kind == "dense":
                first, last = layout.spans[block.places[0]], layout.spans[block.places[-1]]
                cuts.append((first.vector, slice(first.begin, last.end), tuple(block.variable.shape)))
            elif kind == "sparse":
                cuts.append(block.places[0])
        key = tuple(of_blocks)
        if cuts and key not in self._calls:  # several combinations of kinds differ in lazy blocks only
            self._calls[key] = self._call(key)
        made = self._plans[kinds] = _Plan(lazily, cuts, *self._changed_by(kinds), self._calls.get(key))
        return made

    def _changed_by(self, kinds: Sequence[Kind]) -> tuple[list[int], list[int]]:
        """Returns the variables that gradients change as a whole, and those of which they change the named rows."""
        whole, by_rows = [], []
        for place, (kind, held) in enumerate(zip(kinds, self.held, strict=True)):
            keeps = self._is_lazy(place) or keeps_other_values(self._optimizer, held.decays)
            if held.constraint is not None or not keeps or kind == "dense":
                whole.append(place)
            elif kind == "sparse":
                by_rows.append(place)
        return whole, by_rows

    def _call(self, kinds: Sequence[Kind]) -> Callable[[Sequence[Any]], dict[int, Any]]:
        """Returns the update by gradients of these kinds, one for each block; it returns new values by block number."""
        # XLA fuses the operations on a vector, which takes a quarter of the time where it is large.
        may_fail = self._is_elementwise and set(kinds) <= {"dense", "none"}
        graph = self._graph(kinds, is_compiled=may_fail)

        def call(given: Sequence[Any]) -> dict[int, Any]:
            nonlocal graph, may_fail
            try:
                values = graph(given)
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
                if not may_fail:
                    raise
                # XLA cannot compile the update, for example with a user's learning rate schedule.
                graph = self._graph(kinds, is_compiled=False)
                values = graph(given)
            may_fail = False
            return values

        return call

    def _graph(self, kinds: Sequence[Kind], is_compiled: bool) -> Callable[[Sequence[Any]], dict[int, Any]]:
        # TensorFlow copies a variable that rows were scattered to for every read: such blocks are read only on demand.
        numbers = [_ITERATIONS, *(number for number in range(len(kinds)) if number not in self._by_rows)]

        def update(*arrays: Any) -> list[Any]:
            rest, pairs = iter(arrays), []
            for block, kind in zip(self._blocks, kinds, strict=True):
                if kind == "dense":
                    pairs.append((next(rest), block.variable))
                elif kind == "sparse":
                    shape = tf.constant(tuple(block.variable.shape), tf.int64)
                    pairs.append((tf.IndexedSlices(next(rest), next(rest), shape), block.variable))
            gradients, variables = zip(*pairs, strict=True)
            self._optimizer.apply(gradients, variables)
            return [self._variables(number).value.read_value() for number in numbers]

        specs = []
        for block, kind in zip(self._blocks, kinds, strict=True):
            shape, dtype = tuple(block.variable.shape), block.variable.dtype
            if kind == "dense":
                specs.append(tf.TensorSpec(shape, dtype))
            elif kind == "sparse":
                specs += [tf.TensorSpec((None, *shape[1:]), dtype), tf.TensorSpec((None,), tf.int64)]
        call = call_of(tf.function(update, jit_compile=is_compiled).get_concrete_function(*specs))
        return lambda given: dict(zip(numbers, call(given), strict=True))

    def _make(self, state: TrainingState) -> None:
        """Makes the variables and the optimizer."""
        self._optimizer = deserialized(self.config)
        self._is_elementwise = is_elementwise(self._optimizer)
        runs = self._runs() if self._is_elementwise else [(place,) for place in range(len(self.held))]
        self._blocks = [_RowBlock(run, self._variable(run, state)) for run in runs]
        undecayed = [block.variable for block in self._blocks if not self.held[block.places[0]].decays]
        if undecayed:
            self._optimizer.exclude_from_weight_decay(var_list=undecayed)
        self._slots = slots_of.build(self._optimizer, [block.variable for block in self._blocks])
        for slot in self._slots:
            places = self._blocks[slot.variable].places
            if state.slots and all(slot.name in state.slots[place] for place in places):
                parts = [state.slots[place][slot.name] for place in places]
                slot.value.assign(_joined(parts).reshape(slot.value.shape))
        for name, variable in slots_of.scalars_of(self._optimizer, self._slots).items():
            rate = optimizers.learning_rate(self._optimizer)
            is_scheduled = name == "learning_rate" and not isinstance(rate, keras.Variable)
            if name in state.scalars and not is_scheduled:
                variable.assign(state.scalars[name])
        self._newest: dict[int, Any] = {}
        self._by_rows: set[int] = set()
        self._plans: dict[tuple[Kind, ...], _Plan] = {}
        self._calls: dict[tuple[Kind, ...], Callable[[Sequence[Any]], dict[int, Any]]] = {}
        self._of_vectors: dict[tuple[Kind, ...], list[list[int]]] = {}

    def _runs(self) -> list[tuple[int, ...]]:
        """Returns the variables in runs: each run is consecutive in a vector and is updated in the same way."""
        runs: list[list[int]] = []
        last: dict[np.dtype, int | None] = {}
        for place, (part, dtype) in enumerate(zip(self.held, self.shapes.dtypes, strict=True)):
            run = last.get(dtype)
            if place in self._apart:
                runs.append([place])
                last[dtype] = None
            elif run is not None and self.held[runs[run][0]].decays == part.decays:
                runs[run].append(place)
            else:
                last[dtype] = len(runs)
                runs.append([place])
        return [tuple(run) for run in runs]

    def _variable(self, places: Sequence[int], state: TrainingState) -> Any:
        held = self.held[places[0]]
        value = state.values[places[0]] if len(places) == 1 else _joined([state.values[place] for place in places])
        variable = keras.Variable(value, dtype=value.dtype.name, name=held.path.replace("/", "_"))
        if held.constraint is not None:
            variable.constraint = keras.constraints.deserialize(held.constraint)
        return variable

    def _separate(self, places: set[int]) -> None:
        """Moves variables from their blocks to blocks of their own."""
        state = self.state()
        self._apart |= places
        self._make(state)

    def _split(self, block: _RowBlock, array: np.ndarray) -> list[np.ndarray]:
        """Splits a block's array into the arrays of its variables."""
        if len(block.places) == 1:
            return [array]
        shapes = [self.shapes.shapes[place] for place in block.places]
        bounds = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(array, bounds), shapes, strict=True)]

    def _in_vectors(
        self, array_of: Callable[[int], np.ndarray], kinds: Sequence[Kind] | None = None
    ) -> list[np.ndarray]:
        """Returns vectors in the layout for these kinds.

        Args:
            array_of: function that returns the array of a block, by its number.
            kinds: kind of each variable's gradient; all are dense by default.
        """
        key = tuple(kinds or ())
        if key not in self._of_vectors:
            layout = self.shapes.layout(kinds)
            self._of_vectors[key] = [[] for _ in layout.dtypes]
            for number, block in enumerate(self._blocks):  # in the order of their places, as spans are
                if block.places[0] in layout.spans:
                    self._of_vectors[key][layout.spans[block.places[0]].vector].append(number)
        ordered = [[array_of(number).reshape(-1) for number in numbers] for numbers in self._of_vectors[key]]
        return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in ordered]


def _kind(kinds: Sequence[Kind], block: _RowBlock) -> Kind | None:
    """Returns the kind of a block's gradient; None for different kinds, or for several sparse gradients."""
    of_block = {kinds[place] for place in block.places}
    if len(of_block) > 1 or (of_block == {"sparse"} and len(block.places) > 1):
        return None
    return of_block.pop()


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.reshape(array, -1) for array in arrays])
