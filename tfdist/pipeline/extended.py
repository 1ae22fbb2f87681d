"""The `extended` of `PipelineStrategy`: all-reduce along the data axis, stages of models along the other axis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.compressor import Compressor
from tfdist.engine.bridge import Bridge
from tfdist.engine.counts import CountReducer
from tfdist.engine.edges import Edges
from tfdist.engine.exchange import Exchange
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline import batch_sizes
from tfdist.pipeline import cuts as model_cuts
from tfdist.pipeline import placement as places
from tfdist.pipeline.mesh import PipelineMesh
from tfdist.pipeline.model_steps import ModelSteps
from tfdist.pipeline.placement import Placement
from tfdist.pipeline.processes import PipelineCollectives
from tfdist.pipeline.recording import Recording
from tfdist.pipeline.split_weights import SplitWeights
from tfdist.pipeline.stages import Stages
from tfdist.pipeline.table import Edge, Table
from tfdist.pipeline.transport import Transport
from tfdist.pipeline.variables_of_stages import VariablesOfStages
from tfdist.private.models import initializer_of
from tfdist.private.optimizers import variables_of
from tfdist.strategies.all_reduce.extended import AllReduceExtended
from tfdist.strategies.divided import weight_parts
from tfdist.strategies.divided.described_variables import is_described
from tfdist.strategies.divided.optimizer_slots import optimizer_variables
from tfdist.strategies.divided_abilities import HasStages

_PIPELINED = "_tfdist_pipelined"
"""Attribute of a model that holds its `PipelinedModel`."""


class PipelinedModel:
    """A model divided into stages, with its steps and the placement of its variables.

    Args:
        model: a Keras model.
        extended: the `extended` of the model's strategy.
        name: name that all processes have for this model alone.

    Attributes:
        stages: the model's stages.
        table: the actions of a training step.
        placement: the workers that hold each variable.
    """

    def __init__(self, model: Any, extended: PipelineExtended, name: str) -> None:
        self._model = model
        self._extended = extended
        self._name = name
        mesh = extended.mesh
        calls = ModelCalls(model)
        _check_layers(calls)
        self.stages = Stages(calls, model_cuts.ends_of(calls, extended.stages, extended.cuts))
        self.table = extended.schedule(self.stages.edges)
        within = mesh.workers == 1
        self._own = tuple(range(len(self.table.rows))) if within else (mesh.worker,)
        if not within:
            places.lend(self.stages, self.table.workers)
        self.placement = Placement(
            self.stages, self.table.workers, self._own, extended.devices_of_workers, extended.split_weights.allocate
        )
        processes = None if within else PipelineCollectives(mesh.pipeline, name, extended.stopping)
        transport = None if within else Transport(Edges(mesh.pipeline), name)
        self.steps = ModelSteps(
            model,
            self.stages,
            self.table,
            self._own,
            transport,
            extended.devices_of_workers,
            extended.recomputes,
            processes,
            self.placement.holds,
            extended.recording,
            extended.split_weights.update,
        )

    def place(self) -> None:
        """Allocates this process's part of the model, its metrics and its optimizer, as far as they are made."""
        model = self._model
        if getattr(model, "optimizer", None) is not None:
            self._extended.split_weights.check_updates(model.optimizer, model.trainable_variables)
            self.placement.add_slots(model.optimizer)
        variables = places.variables_of(model)
        new = [variable for variable in variables if is_described(variable)]
        if not new:
            return
        shared = [
            variable
            for variable in new
            if len(self.placement.workers(variable)) > 1 or not self.placement.workers(variable)
        ]
        begins = [
            variable
            for variable in shared
            if initializer_of(variable) is not None and weight_parts.of(variable) is None
        ]
        with self._extended._container_strategy().scope():
            self.placement.place(variables)
        self.remote().equalize([variable for variable in begins if self._extended.mesh.workers > 1])

    def remote(self) -> VariablesOfStages:
        """Returns an object that reads and assigns variables of all processes."""
        variables, parts = places.variables_of(self._model), self._extended.split_weights.owner
        return VariablesOfStages(self._extended.mesh, self.placement, variables, self._name, parts)


def _check_layers(calls: ModelCalls) -> None:
    for call in calls.calls:
        if getattr(call.operation, "stateful", False):
            raise ValueError(
                f"PipelineStrategy divides batches into micro-batches: the layer {call.name} cannot keep a state for "
                "each sample of a batch. Leave out stateful=True."
            )


class PipelineExtended(AllReduceExtended, HasStages):
    """The `extended` of `PipelineStrategy`: pipelines side by side, each on one or several processes.

    Args:
        strategy: the strategy that this is the `extended` of.
        mesh: the processes by worker and pipeline.
        device: this process's device, on which its stages are if a pipeline has several processes.
        devices_of_workers: device of each worker if all workers are in this process; None otherwise.
        stages: number of stages.
        micro_batches: number of micro-batches of each replica's batch.
        cuts: how models are cut into stages.
        schedule: makes the table of a step from the edges between stages.
        recomputes: whether backward passes compute activations again instead of keeping them.
        compressor: compresses gradients along the data axis; None for no compression.
        checks_weights: whether `fit` compares the weights of pipelines after each epoch.
        keep_rows: whether sparse gradients keep every occurrence of a row.
        records: whether the times of training steps are recorded.
        splits: whether layers are split over the mesh's axes.

    Attributes:
        mesh: as given.
        stages: as given.
        cuts: as given.
        schedule: as given.
        recomputes: as given.
        devices_of_workers: as given.
        recording: times of the last training steps of all models; None if they are not recorded.
        split_weights: the weights of split layers.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        mesh: PipelineMesh,
        device: str,
        devices_of_workers: Sequence[str] | None,
        stages: int,
        micro_batches: int,
        cuts: model_cuts.Cuts,
        schedule: Callable[[Sequence[Edge]], Table],
        recomputes: bool,
        compressor: Compressor | None = None,
        checks_weights: bool = True,
        keep_rows: bool = True,
        records: bool = False,
        splits: bool = False,
    ) -> None:
        self.more = f", mesh={mesh.mesh}" if splits else ""
        super().__init__(strategy, mesh.replicas, [device], compressor, checks_weights, keep_rows)
        self.mesh = mesh
        self.stages = stages
        self.cuts = cuts
        self.schedule = schedule
        self.recomputes = recomputes
        self.devices_of_workers = devices_of_workers
        self.recording = Recording(mesh.pipeline) if records else None
        self.split_weights = SplitWeights(self, mesh, splits)
        self.over_updaters = Bridge(mesh.all_processes if splits else mesh.pipeline)
        self.over_parts = Bridge(mesh.replicas)
        self._micro_batches = micro_batches
        self._everyone = Exchange(mesh.all_processes)
        if mesh.workers > 1:
            # Processes with the same stage count a step first, then those of a pipeline agree on it. Only then does
            # every process know of a wish to stop.
            self._counts = CountReducer(
                mesh.replicas, "ranks with another batch", self.stopping.own, self.stopping.pass_on
            )

    @property
    def all_processes(self) -> Exchange:
        """Broadcasts and gathers tensors among all processes."""
        return self._everyone

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this process's communication, or None."""
        return self.mesh.all_processes.failure or super().failure

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files for all processes."""
        return self.mesh.all_processes.is_writer

    def of_model(self, model: Any) -> PipelinedModel:
        """Returns a model in stages, after allocating its variables where they belong.

        Args:
            model: a built Keras model with a graph of calls.

        Raises:
            ValueError: the model cannot be divided into the stages.
        """
        pipelined = _pipelined(model)
        if pipelined is None:
            name = f"pipeline {self.mesh.all_processes.number('pipelined model')}"
            # Not as an attribute: Keras would track the object as a part of the model.
            pipelined = model.__dict__[_PIPELINED] = PipelinedModel(model, self, name)
        pipelined.place()
        return pipelined

    def check_batches(self, x: Any, batch_size: int | None) -> None:
        """Checks that the batches can be divided; see `HasStages`."""
        batch_sizes.check(x, batch_size, self._micro_batches, self.mesh.data)

    def steps_of(self, model: Any) -> ModelSteps:
        """Returns the steps of a model in stages; see `HasStages`."""
        return self.of_model(model).steps

    def number_of_parts(self, mesh_axis: str) -> int:
        """Returns the number of parts of weights that are split over an axis of the mesh; see `SplitsLayers`."""
        return self.split_weights.number_of_parts(mesh_axis)

    def assign_part(self, variable: Any, value: Any) -> None:
        """Assigns this process's part of a value, if it has a part of the variable; see `DividesUpdates`."""
        kept = weight_parts.of(variable)
        if kept is not None:
            kept.assign(value)

    def per_process_variables(self, model: Any) -> list[Any]:
        """Returns the variables that are split; see `DataParallel.per_process_variables`."""
        return [variable for variable in places.variables_of(model) if weight_parts.of(variable) is not None]

    @contextlib.contextmanager
    def updating(self, optimizer: Any) -> Iterator[None]:
        """Context in which an optimizer has this process's parts of its variables; see `DividesUpdates`."""
        with weight_parts.only_parts([*variables_of(optimizer), *optimizer_variables(optimizer)]):
            yield

    def place(self, model: Any) -> None:
        """Divides a model, and allocates this process's part of it; see `HasStages`."""
        self.of_model(model)

    def holds(self, model: Any, variable: Any) -> bool:
        """Returns whether this process holds a variable, and all of it; see `Ability.holds`."""
        pipelined = _pipelined(model)
        if pipelined is None or weight_parts.of(variable) is not None:
            return not is_described(variable)
        return pipelined.placement.holds(variable)

    def remote(self, model: Any) -> VariablesOfStages:
        """Returns an object that reads and assigns the variables of all processes; see `DividesUpdates`."""
        return self.of_model(model).remote()

    def equalize(self, model: Any) -> None:
        """Gives all holders of a variable the value of the first one; see `HasStages`."""
        self.remote(model).equalize(places.variables_of(model))

    def values(self, model: Any, variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables as arrays, on all processes; see `HasStages`."""
        remote = self.remote(model)
        return [remote.broadcast(variable) for variable in variables]


def _pipelined(model: Any) -> PipelinedModel | None:
    """Returns the `PipelinedModel` of a model; None if it has none yet."""
    return model.__dict__.get(_PIPELINED)
