"""The `extended` of `PipelineStrategy`: all-reduce along the data axis, and a model's stages along the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.compressor import Compressor
from tfdist.engine.bridge import Bridge
from tfdist.engine.counts import Counts
from tfdist.engine.edges import Edges
from tfdist.engine.exchange import Exchange
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline import batch_sizes
from tfdist.pipeline import cuts as model_cuts
from tfdist.pipeline import placement as places
from tfdist.pipeline.described_variables import is_described
from tfdist.pipeline.mesh import Mesh
from tfdist.pipeline.model_steps import ModelSteps
from tfdist.pipeline.placement import Placement
from tfdist.pipeline.processes import Processes
from tfdist.pipeline.recording import Recording
from tfdist.pipeline.remote_variables import RemoteVariables
from tfdist.pipeline.stages import Stages
from tfdist.pipeline.table import Edge, Table
from tfdist.pipeline.transport import Transport
from tfdist.private.models import initializer_of
from tfdist.strategies.abilities import HasStages
from tfdist.strategies.all_reduce.extended import AllReduceExtended

_PIPELINED = "_tfdist_pipelined"
"""Attribute of a model, with which what is known of it goes."""


class PipelinedModel:
    """A model in stages.

    Args:
        model: of Keras.
        extended: of its strategy.
        name: one that all processes have for this model alone.

    Attributes:
        stages: of the model.
        table: what a training step does.
        placement: where its variables are.
    """

    def __init__(self, model: Any, extended: PipelineExtended, name: str) -> None:
        self._model = model
        self._extended = extended
        self._name = name
        mesh = extended.mesh
        calls = ModelCalls(model)
        self.stages = Stages(calls, model_cuts.ends_of(calls, extended.stages, extended.cuts))
        self.table = extended.schedule(self.stages.edges)
        within = mesh.workers == 1
        self._own = tuple(range(len(self.table.rows))) if within else (mesh.worker,)
        if not within:
            places.lend(self.stages, self.table.workers)
        self.placement = Placement(self.stages, self.table.workers, self._own, extended.devices_of_workers)
        processes = None if within else Processes(mesh.pipeline, name, extended.stopping)
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
        )

    def place(self) -> None:
        """Allocates what this process holds of the model, its metrics and its optimizer, as far as they are made."""
        model = self._model
        if getattr(model, "optimizer", None) is not None:
            self.placement.add_slots(model.optimizer)
        variables = places.variables_of(model)
        new = [one for one in variables if is_described(one)]
        if not new:
            return
        shared = [one for one in new if len(self.placement.workers(one)) > 1 or not self.placement.workers(one)]
        begins = [one for one in shared if initializer_of(one) is not None]
        with self._extended._container_strategy().scope():
            self.placement.place(variables)
        self.remote().equalize([one for one in begins if self._extended.mesh.workers > 1])

    def remote(self) -> RemoteVariables:
        """Reads and assigns variables wherever they are."""
        return RemoteVariables(self._extended.mesh, self.placement, places.variables_of(self._model), self._name)


class PipelineExtended(AllReduceExtended, HasStages):
    """Pipelines beside each other, each of one or several processes.

    Args:
        strategy: that this is the `extended` of.
        mesh: the processes.
        device: of this process, that its stages are on if there are several processes.
        devices_of_workers: of the workers that are all in this process; None otherwise.
        stages: number of stages.
        micro_batches: number of parts of each replica's batch.
        cuts: where models are cut.
        schedule: makes the table of a step, of the edges between stages.
        recomputes: whether activations are computed again for backward passes.
        compressor: of gradients, along the data axis.
        checks_weights: as of `AllReduceExtended`.
        keep_rows: as of `AllReduceExtended`.
        records: whether the times of training steps are recorded.

    Attributes:
        mesh: as given.
        stages: as given.
        cuts: as given.
        schedule: as given.
        recomputes: as given.
        devices_of_workers: as given.
        recording: of training steps, of all models; None if there is none.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        mesh: Mesh,
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
    ) -> None:
        super().__init__(strategy, mesh.replicas, [device], compressor, checks_weights, keep_rows)
        self.mesh = mesh
        self.stages = stages
        self.cuts = cuts
        self.schedule = schedule
        self.recomputes = recomputes
        self.devices_of_workers = devices_of_workers
        self.recording = Recording(mesh.pipeline) if records else None
        self.over_stages = Bridge(mesh.pipeline)
        self._micro_batches = micro_batches
        self._everyone = Exchange(mesh.everyone)
        self._leads = False
        if mesh.workers > 1:
            # Those that have one stage count a step, and then those of a pipeline agree on it: only then all know.
            self._counts = Counts(mesh.replicas, "who has another batch", self.stopping.own, self.stopping.pass_on)

    @property
    def everyone(self) -> Exchange:
        """Among all processes."""
        return self._everyone

    @property
    def failure(self) -> BaseException | None:
        """See `Ability.failure`."""
        return self.mesh.everyone.failure or super().failure

    @property
    def is_writer(self) -> bool:
        """Whether this process writes for all."""
        return self.mesh.everyone.is_writer

    def of_model(self, model: Any) -> PipelinedModel:
        """A model in stages, whose variables are where they belong.

        Args:
            model: built, with a graph of calls.

        Raises:
            ValueError: it cannot be divided into the stages.
        """
        found = _pipelined(model)
        if found is None:
            name = f"pipeline {self.mesh.everyone.number('pipelined model')}"
            # Beside Keras, which would take what it is given for a part of the model.
            found = model.__dict__[_PIPELINED] = PipelinedModel(model, self, name)
        found.place()
        return found

    def check_batches(self, x: Any, batch_size: int | None) -> None:
        """See `HasStages`."""
        batch_sizes.check(x, batch_size, self._micro_batches, self.mesh.data)

    def steps_of(self, model: Any) -> ModelSteps:
        """See `HasStages`."""
        return self.of_model(model).steps

    def place(self, model: Any) -> None:
        """See `HasStages`."""
        self.of_model(model)

    def holds(self, model: Any, variable: Any) -> bool:
        """See `Ability.holds`."""
        found = _pipelined(model)
        return not is_described(variable) if found is None else found.placement.holds(variable)

    @property
    def saves_with_the_writer(self) -> bool:
        """See `Ability`."""
        return True

    def by_the_writer(self, model: Any, action: Callable[[], Any]) -> Any:
        """See `Ability.by_the_writer`."""
        if self._leads:
            return action()
        remote = self.of_model(model).remote()
        if not self.is_writer:
            remote.answer()
            return None
        self._leads = True
        try:
            with remote.led(), self.local_only():
                return action()
        finally:
            self._leads = False

    def equalize(self, model: Any) -> None:
        """See `HasStages`."""
        self.of_model(model).remote().equalize(places.variables_of(model))

    def values(self, model: Any, variables: Sequence[Any]) -> list[Any]:
        """See `HasStages`."""
        remote = self.of_model(model).remote()
        return [remote.broadcast(one) for one in variables]


def _pipelined(model: Any) -> PipelinedModel | None:
    """What is known of a model that is in stages."""
    return model.__dict__.get(_PIPELINED)
