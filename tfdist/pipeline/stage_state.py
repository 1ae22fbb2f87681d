"""State of layers besides weights, such as moving statistics and seeds, under micro-batches.

Micro-batches are treated like replicas: each begins with the state from before the step, and afterwards the state is
the mean of theirs, weighted by samples. With `keras.Variable`'s ``aggregation`` "sum" the changes are added up.
Integers and variables with "only_first_replica" get the state of the first micro-batch. Seeds and the variables of
layers' metrics pass from one micro-batch to the next, so that Dropout differs between micro-batches.

A stage runs in Keras's `StatelessScope`, which notes assignments instead of making them. So a forward pass can be
repeated with the same seeds and the same result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.pipeline.stages import Stages
from tfdist.private.keras import backend
from tfdist.strategies import current_strategy
from tfdist.strategies.data.shares import weighed

_SEED = "seed_generator_state"
"""Keras's name for the variable of a `SeedGenerator`."""
_SEED_STRIDE = 1_000_003
"""Distance between the seeds of stages that call the same layer."""


class StageState:
    """The state of the layers of one stage, during a step.

    Args:
        stages: the model's stages.
        stage: number of the stage.
        batch: the batch in micro-batches.
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
                if _passes_between_micro_batches(variable) and self._home(variable) != stage:
                    # Stages that call the same layer begin with different seeds.
                    self._now[id(variable)] = variable, variable.value + stage * _SEED_STRIDE

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Context of the forward pass of a micro-batch.

        Args:
            number: number of the micro-batch.

        Raises:
            ValueError: a layer assigns to a trainable weight.
        """
        self._begun[number] = list(self._now.values())
        with Noting(state_mapping=self._begun[number], collect_losses=True) as scope:
            yield
        for variable in scope.assigned.values():
            value = scope.get_current_value(variable)
            if variable.trainable:
                raise ValueError(
                    f"a layer assigns to its trainable weight {variable.path} when it is called, which does not work "
                    "with micro-batches: freeze the layer, or use another one"
                )
            if _passes_between_micro_batches(variable):
                if variable.name != _SEED:  # of a metric, which does not count a stand-in row
                    _, before = self._now.get(id(variable), (variable, variable.value))
                    value = tf.where(self._has_samples(number), value, before)
                self._now[id(variable)] = variable, value
            else:
                self._found.setdefault(id(variable), (variable, {}))[1][number] = value

    @contextlib.contextmanager
    def again(self, number: int) -> Iterator[None]:
        """Context in which a forward pass is repeated.

        Args:
            number: number of the micro-batch.
        """
        with backend.StatelessScope(state_mapping=self._begun[number], collect_losses=True):
            yield

    def assign(self) -> None:
        """Assigns the state after the last micro-batch.

        Raises:
            ValueError: calls in several stages change a variable, such as moving statistics, of the same layer.
        """
        for variable, value in self._now.values():
            if self._home(variable) == self._stage:
                variable.assign(value)
        for variable, values in self._found.values():
            if len(self._stages.homes.get(id(variable), ())) > 1:
                raise ValueError(
                    f"{variable.path} is changed by calls in the stages {list(self._stages.homes[id(variable)])}, each "
                    "on its own: cut the model so that one stage has all calls of the layer"
                )
            variable.assign(self._merged(variable, values))

    def _has_samples(self, number: int) -> tf.Tensor:
        """Returns whether a micro-batch has more than a stand-in row, of its own or of a pipeline without samples."""
        sharing, has_rows = current_strategy.sharing(), self._batch.rows[number] > 0
        return has_rows if sharing is None else tf.logical_and(has_rows, tf.logical_not(sharing.shares.is_empty()))

    def _home(self, variable: Any) -> int:
        """Returns the stage that assigns a variable; each stage assigns those of no layer, as Keras's global seed."""
        return self._stages.homes.get(id(variable), (self._stage,))[0]

    def _merged(self, variable: Any, values: dict[int, tf.Tensor]) -> tf.Tensor:
        dtype = tf.as_dtype(variable.dtype)
        if variable.aggregation == "only_first_replica" or not (dtype.is_floating or variable.aggregation == "sum"):
            return values[min(values)]
        if variable.aggregation == "sum":
            before = tf.convert_to_tensor(variable.value)
            return before + tf.add_n(
                [tf.where(self._batch.rows[number] > 0, value - before, 0) for number, value in values.items()]
            )
        wide = dtype if dtype.size >= 4 else tf.float32
        parts = [weighed(tf.cast(value, wide), self._batch.weight(number)) for number, value in values.items()]
        return tf.cast(tf.add_n(parts), dtype)


class Noting(backend.StatelessScope):
    """A stateless scope that notes which variables were assigned, whether of layers or not.

    Attributes:
        assigned: the assigned variables, by their `id`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Notes the variable of an assignment; see `keras.StatelessScope`."""
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]


def _passes_between_micro_batches(variable: Any) -> bool:
    """Returns whether a variable passes from one micro-batch to the next, as seeds and metrics' variables do."""
    return variable.name == _SEED or variable.synchronization == "on_read"
