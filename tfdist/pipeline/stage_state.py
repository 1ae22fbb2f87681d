"""What layers keep beside weights, as moving statistics and seeds, under micro-batches.

Micro-batches are to it what replicas are: each begins with the state from before the step, and afterwards the state is
the mean of theirs, weighed by samples; `keras.Variable`'s ``aggregation`` "sum" adds up the changes, and integers and
"only_first_replica" are those of the first micro-batch. Seeds go on from one micro-batch to the next, so that Dropout
differs between them, and so does what metrics of layers keep.

A stage runs in Keras's `StatelessScope`, which notes what is assigned instead of assigning it. So a forward pass can be
made once more, with the same seeds, to the same end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.pipeline.stages import Stages
from tfdist.private.keras import backend
from tfdist.strategies.data.shares import weighed

_SEED = "seed_generator_state"
"""Keras's name of the variable of a `SeedGenerator`."""
_APART = 1_000_003
"""Between the seeds of stages that call one layer."""


class StageState:
    """The state of the layers of one stage, during a step.

    Args:
        stages: of the model.
        stage: which one.
        batch: in micro-batches.
    """

    def __init__(self, stages: Stages, stage: int, batch: MicroBatches) -> None:
        self._stages = stages
        self._stage = stage
        self._batch = batch
        self._now: dict[int, tuple[Any, tf.Tensor]] = {}
        self._begun: dict[int, list[tuple[Any, tf.Tensor]]] = {}
        self._found: dict[int, tuple[Any, dict[int, tf.Tensor]]] = {}
        for layer in stages.layers(stage):
            for variable in layer.non_trainable_variables:
                if _goes_on(variable) and self._home(variable) != stage:
                    # Stages that call one layer begin with different seeds.
                    self._now[id(variable)] = variable, variable.value + stage * _APART

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Context of the forward pass of a micro-batch.

        Args:
            number: which one.

        Raises:
            ValueError: a layer assigns to a weight that is trained.
        """
        self._begun[number] = list(self._now.values())
        with Noting(state_mapping=self._begun[number], collect_losses=True) as scope:
            yield
        for variable in scope.assigned.values():
            value = scope.get_current_value(variable)
            if variable.trainable:
                raise ValueError(
                    f"a layer assigns to its weight {variable.path} when it is called, while gradients of it are "
                    "computed: such a layer cannot be trained with micro-batches"
                )
            if _goes_on(variable):
                self._now[id(variable)] = variable, value
            else:
                self._found.setdefault(id(variable), (variable, {}))[1][number] = value

    @contextlib.contextmanager
    def again(self, number: int) -> Iterator[None]:
        """Context in which a forward pass is made once more.

        Args:
            number: of the micro-batch.
        """
        with backend.StatelessScope(state_mapping=self._begun[number], collect_losses=True):
            yield

    def assign(self) -> None:
        """Assigns what has been found, after the last micro-batch.

        Raises:
            ValueError: a layer with moving statistics or the like is called in several stages.
        """
        for variable, value in self._now.values():
            if self._home(variable) == self._stage:
                variable.assign(value)
        for variable, found in self._found.values():
            if len(self._stages.homes.get(id(variable), ())) > 1:
                raise ValueError(
                    f"{variable.path} is changed by calls in the stages {list(self._stages.homes[id(variable)])}, each "
                    "on its own: cut the model so that one stage has all calls of the layer"
                )
            variable.assign(self._merged(variable, found))

    def _home(self, variable: Any) -> int:
        """The stage that assigns a variable. What is of no layer, as Keras's global seed, each stage does."""
        return self._stages.homes.get(id(variable), (self._stage,))[0]

    def _merged(self, variable: Any, found: dict[int, tf.Tensor]) -> tf.Tensor:
        dtype = tf.as_dtype(variable.dtype)
        if variable.aggregation == "only_first_replica" or not (dtype.is_floating or variable.aggregation == "sum"):
            return found[min(found)]
        if variable.aggregation == "sum":
            before = tf.convert_to_tensor(variable.value)
            return before + tf.add_n(
                [tf.where(self._batch.rows[number] > 0, value - before, 0) for number, value in found.items()]
            )
        wide = dtype if dtype.size >= 4 else tf.float32
        parts = [weighed(tf.cast(value, wide), self._batch.weight(number)) for number, value in found.items()]
        return tf.cast(tf.add_n(parts), dtype)


class Noting(backend.StatelessScope):
    """A scope that knows which variables were assigned, of layers or not.

    Attributes:
        assigned: the variables, by their `id`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """See `keras.StatelessScope`."""
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]


def _goes_on(variable: Any) -> bool:
    """Whether each micro-batch begins with what the one before it has left: seeds, and what metrics keep."""
    return variable.name == _SEED or variable.synchronization == "on_read"
