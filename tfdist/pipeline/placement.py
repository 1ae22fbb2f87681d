"""Placement of variables on a pipeline's workers: where their layers are called, together with optimizer slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from tfdist.model_parallel.model_calls import trainable_variables
from tfdist.pipeline.stages import Stages
from tfdist.strategies.devices import requested_device
from tfdist.strategies.divided import described_variables, optimizer_slots, split_axis

_PLACED = "_tfdist_pipeline_workers"


class Placement:
    """The workers that hold the variables of a model and of its optimizer, seen from one process.

    Args:
        stages: the model's stages.
        workers: number of the worker of each stage.
        own: numbers of this process's workers.
        devices: device of each worker; None for the default device.
        allocate: allocates a variable that workers hold, or this process's part of it.

    Attributes:
        own: as given.
    """

    def __init__(
        self,
        stages: Stages,
        workers: Sequence[int],
        own: Iterable[int],
        devices: Sequence[str] | None,
        allocate: Callable[[Any, Sequence[int]], None] = lambda variable, _: described_variables.allocate(variable),
    ) -> None:
        self.own = frozenset(own)
        self._allocate = allocate
        self._devices = devices
        self._workers: dict[int, tuple[Any, tuple[int, ...]]] = {}
        for stage in range(stages.count):
            for layer in stages.layers(stage):
                for variable in layer.variables:
                    homes = stages.homes[id(variable)]
                    self._workers[id(variable)] = variable, tuple(dict.fromkeys(workers[home] for home in homes))

    def workers(self, variable: Any) -> tuple[int, ...]:
        """Returns the workers that hold a variable, of which the first answers requests for it; empty if all hold it.

        Args:
            variable: a Keras variable.
        """
        return self._workers.get(id(variable), (None, ()))[1]

    def holds(self, variable: Any) -> bool:
        """Returns whether this process holds a variable.

        Args:
            variable: a Keras variable.
        """
        workers = self.workers(variable)
        return not workers or not self.own.isdisjoint(workers)

    def add_slots(self, optimizer: Any) -> None:
        """Places the variables that an optimizer keeps for each weight (slots) with the weight.

        Args:
            optimizer: a built Keras optimizer.
        """
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is not None:
            self.add_slots(inner)
        for variable, slot in optimizer_slots.slots_by_variable(optimizer):
            self._workers[id(slot)] = slot, self.workers(variable)
            if slot.shape == variable.shape:
                split_axis.ask_for(slot, split_axis.asked_for(variable))

    def place(self, variables: Iterable[Any]) -> None:
        """Allocates the variables that this process holds, and leaves the others to their workers.

        Args:
            variables: Keras variables; the caller is in the scope of their strategy.
        """
        for variable in variables:
            workers = self.workers(variable)
            self._check_place(variable, workers)
            if self.holds(variable):
                with self._on_device(workers):
                    self._allocate(variable, workers)
            elif not described_variables.is_elsewhere(variable):
                described_variables.leave_to(variable, f"worker {workers[0]} of the pipeline")

    def _check_place(self, variable: Any, workers: tuple[int, ...]) -> None:
        """Raises `ValueError` on the processes between which a variable would have to move for this model."""
        before = getattr(variable, _PLACED, workers)
        is_apart = set(before).isdisjoint(workers)
        if workers and is_apart and self.own.isdisjoint(before) != self.own.isdisjoint(workers):
            raise ValueError(
                f"{variable.path} is on worker {before[0]} of the pipeline, for a model that was made before, and this "
                f"model needs it on worker {workers[0]}. Make this model in the scope of a PipelineStrategy(cuts=[…]) "
                "of its own, which names the layers that its stages begin with, so that shared layers stay where they "
                "are."
            )
        if workers:
            setattr(variable, _PLACED, workers)

    @contextlib.contextmanager
    def _on_device(self, workers: tuple[int, ...]) -> Iterator[None]:
        local_workers = [worker for worker in workers if worker in self.own]
        if self._devices is None or not local_workers:
            yield
            return
        with requested_device.requested(self._devices[local_workers[0]]):
            yield


def lend(stages: Stages, workers: Sequence[int]) -> None:
    """Lends the smallest of all weights to each worker that would train nothing, so that it takes part in updates.

    The stages of a frozen base have weights, but none that are trained. An optimizer cannot update nothing, and the
    other processes wait for this one when they compute norms and look for infinities.

    Args:
        stages: the model's stages, on several processes.
        workers: number of the worker of each stage.
    """
    trained = trainable_variables([layer for stage in range(stages.count) for layer in stages.layers(stage)])
    if not trained:
        return
    whole = [variable for variable in trained if split_axis.asked_for(variable) is None]
    smallest = min(whole or trained, key=lambda variable: variable.shape.num_elements())
    held = {workers[stage] for variable in trained for stage in stages.homes[id(variable)]}
    for stage, worker in enumerate(workers):
        if worker not in held:
            held.add(worker)
            stages.homes[id(smallest)] += (stage,)


def variables_of(model: Any) -> list[Any]:
    """Returns the variables of a model, its metrics and its optimizer, each once; equal on all processes.

    Args:
        model: a Keras model.
    """
    variables = [*model.variables, *model.metrics_variables]
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        variables += optimizer_slots.optimizer_variables(optimizer)
    return list({id(variable): variable for variable in variables}.values())
