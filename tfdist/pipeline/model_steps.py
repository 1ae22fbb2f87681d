"""Keras's steps, `train_step`, `test_step` and `predict_step`, for a model in stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.model_parallel.model_calls import graph_of, trainable_variables
from tfdist.pipeline import schedules
from tfdist.pipeline.divisors import divisors_of, over_replicas
from tfdist.pipeline.dry_run import dry_run
from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.pipeline.objective import Objective
from tfdist.pipeline.processes import PipelineCollectives, sum_of
from tfdist.pipeline.recording import Recording
from tfdist.pipeline.stage_state import Noting
from tfdist.pipeline.stages import Stages
from tfdist.pipeline.step import PipelinedStep
from tfdist.pipeline.table import Table
from tfdist.pipeline.transport import Transport
from tfdist.private import models
from tfdist.private.keras import layer, tree
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.divided import weight_parts
from tfdist.strategies.keras import keras_losses
from tfdist.strategies.keras.keras_assignments import unnoted
from tfdist.thread_values import ThreadValue

_output_loss_only = ThreadValue(False)
"""Whether a thread computes a loss of outputs, without the losses that layers and weights add."""


@Once
def install() -> None:
    """Installs the seams, once."""
    for name in ("_get_own_losses", "_get_regularization_losses"):
        replace(layer.Layer, name, _without_added_losses)


def _without_added_losses(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Leaves out ``model.losses``, which would read the weights of all stages; the step adds those losses itself."""

    def losses(self: Any) -> list[Any]:
        return [] if _output_loss_only.value else original(self)

    return losses


def _apply(optimizer: Any, gradients: Sequence[Any], weights: Sequence[Any], workers: Sequence[Sequence[int]]) -> None:
    optimizer.apply_gradients(zip(gradients, weights, strict=True))


class ModelSteps:
    """The training, test and prediction steps of a model in stages; in graphs and eagerly.

    Args:
        model: a compiled Functional or Sequential model with Keras's own ``train_step``.
        stages: the model's stages.
        table: the actions of a training step.
        workers: numbers of this process's workers.
        transport: carries tensors between workers of different processes; None if all workers are in this process.
        devices: device of each worker; None for the default device.
        recomputes: whether backward passes compute activations again instead of keeping them.
        processes: the processes of the pipeline; None if all its workers are in this process.
        holds: returns whether this process holds a variable.
        recording: takes the times of training steps; None if they are not recorded.
        update: updates weights, given the optimizer, gradients, weights, and the workers that hold each weight.

    Attributes:
        predict_in_graph: `predict` as a TensorFlow function.

    Raises:
        DeadlockError: the workers of the table would wait for each other.
    """

    def __init__(
        self,
        model: Any,
        stages: Stages,
        table: Table,
        workers: Sequence[int],
        transport: Transport | None,
        devices: Sequence[str] | None = None,
        recomputes: bool = False,
        processes: PipelineCollectives | None = None,
        holds: Callable[[Any], bool] = lambda variable: True,
        recording: Recording | None = None,
        update: Callable[[Any, Sequence[Any], Sequence[Any], Sequence[Sequence[int]]], None] = _apply,
    ) -> None:
        install()
        dry_run(table)
        self._model = model
        self._graph = graph_of(model)
        self._stages = stages
        self._table = table
        self._forward = schedules.forward_only(table.workers, table.micro_batches, stages.edges)
        self._workers = tuple(workers)
        self._transport = transport
        self._devices = devices
        self._recomputes = recomputes
        self._processes = processes
        self._holds = holds
        self._recording = recording
        self._update_weights = update
        self._last = table.workers[-1]
        self.predict_in_graph = tf.function(self.predict, reduce_retracing=True, autograph=False)
        self._ends_here = self._last in self._workers

    def check_training(self) -> None:
        """Checks that each worker of a pipeline on several processes has weights, and something to train.

        Raises:
            ValueError: a worker has no weights, or nothing to train.
        """
        if self._processes is None:
            return
        trained = {worker for variable in self._model.trainable_variables for worker in self._workers_of(variable)}
        for worker in range(len(self._table.rows)):
            stages = [stage for stage, its in enumerate(self._table.workers) if its == worker]
            calls = [call.name for stage in stages for call in self._stages.calls_of(stage)]
            its_own = f"worker {worker}, with the calls {calls[0]} to {calls[-1]}," if calls else f"worker {worker}"
            if not any(layer.variables for stage in stages for layer in self._stages.layers(stage)):
                raise ValueError(
                    f"PipelineStrategy: {its_own} would have no weights. Cut the model elsewhere, by cuts=[…], or into "
                    "fewer stages."
                )
            if worker not in trained and trained:
                raise ValueError(
                    f"PipelineStrategy: {its_own} would have nothing to train. Freeze layers before the model is first "
                    "compiled or used, or cut it elsewhere, by cuts=[…]."
                )

    def train(self, data: Any) -> Any:
        """Makes a training step, like Keras's ``train_step``.

        Args:
            data: data of a batch.

        Returns:
            The logs of the step.
        """
        model = self._model
        data = self._agreed(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        inputs = self._inputs(x)
        batch = MicroBatches(inputs[0], self._table.micro_batches)

        whole = x, y, sample_weight
        divisors = self._divisors(whole, inputs)
        assigned: dict[int, Any] = {}  # variables that micro-batches' losses assign, as trackers of outputs' losses

        def loss(outputs: list[Any], number: int | None) -> tf.Tensor:
            if number is None:
                return self._loss(whole, outputs, training=True)
            with Noting() as scope, keras_losses.micro_batch_losses(divisors, batch.weight(number)):
                micro_batch_loss = self._loss(
                    tuple(batch.part(structure, number) for structure in whole), outputs, training=True
                )
            assigned.update(scope.assigned)
            return micro_batch_loss

        optimizer = model.optimizer
        scale = 1.0 if optimizer is None else optimizer.scale_loss(tf.ones([]))
        variables = trainable_variables(self._stages.layers(self._stages.count - 1))
        objective = Objective(loss, batch, self._table.ends_forward_first, variables, scale)
        step = self._step(self._table, batch, inputs, training=True, objective=objective)
        if assigned:
            with tf.control_dependencies(step.last):
                self._loss(whole, self._outputs(batch, step), training=True)
        if optimizer is not None and model.trainable_variables:
            read = [tensor for tensor in tree.flatten(data) if isinstance(tensor, tf.Tensor)]
            with tf.control_dependencies(read):  # the count of updates, too, waits for the check of the data
                self._update(optimizer, step)
        return self._logs(data, batch, step, [*objective.losses, *step.added_losses])

    def test(self, data: Any) -> Any:
        """Makes a test step, like Keras's ``test_step``.

        Args:
            data: data of a batch.

        Returns:
            The logs of the step.
        """
        data = self._agreed(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        inputs = self._inputs(x)
        batch = MicroBatches(inputs[0], self._forward.micro_batches)
        step = self._step(self._forward, batch, inputs, training=False)
        losses = list(step.added_losses)
        if self._ends_here:
            loss = self._loss((x, y, sample_weight), self._outputs(batch, step), training=False)
            losses.append(tf.reduce_mean(loss))  # it may be of single samples
        return self._logs(data, batch, step, losses)

    def predict(self, data: Any) -> Any:
        """Makes a prediction step, like Keras's ``predict_step``.

        Args:
            data: data of a batch.

        Returns:
            The model's outputs.
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        inputs = self._inputs(x)
        batch = MicroBatches(inputs[0], self._forward.micro_batches)
        step = self._step(self._forward, batch, inputs, training=False)
        outputs = self._outputs(batch, step) if self._ends_here else None
        if self._processes is not None:
            with tf.control_dependencies(step.last):
                described = [self._stages.calls.tensors[key] for key in self._stages.calls.outputs]
                specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in described]
                outputs = self._processes.share(outputs, specs, self._last)
        assert outputs is not None
        return self._packed(outputs)

    def _update(self, optimizer: Any, step: PipelinedStep) -> None:
        """Updates the weights that this process holds."""
        held = [weight for weight in self._model.trainable_variables if self._holds(weight)]
        gradients = {id(weight): step.gradients.of(weight) for weight in held}
        shared: dict[tuple[int, ...], list[Any]] = {}
        for variable in held:
            workers = self._workers_of(variable)
            if self._processes is not None and len(workers) > 1:
                shared.setdefault(workers, []).append(variable)
        for workers, variables in sorted(shared.items(), key=lambda pair: pair[0]):
            assert self._processes is not None
            specs = [
                tf.TensorSpec(weight_parts.source_of(weight).shape, weight.dtype, weight.path) for weight in variables
            ]
            sums = self._processes.summed([gradients[id(weight)] for weight in variables], workers, specs)
            gradients.update({id(weight): total for weight, total in zip(variables, sums, strict=True)})
        given = [gradients[id(weight)] for weight in held]
        self._update_weights(optimizer, given, held, [self._workers_of(weight) for weight in held])

    def _workers_of(self, variable: Any) -> tuple[int, ...]:
        """Returns the workers that hold a variable."""
        homes = self._stages.homes.get(id(variable), ())
        return tuple(sorted({self._table.workers[stage] for stage in homes}))

    def _logs(self, data: Any, batch: MicroBatches, step: PipelinedStep, losses: Sequence[tf.Tensor]) -> Any:
        """Returns the logs of a step, which are equal on all processes."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if self._processes is None:
            self._track(x, sum_of(losses))
            return model.compute_metrics(x, y, self._joined(batch, step), sample_weight=sample_weight)
        with tf.control_dependencies(step.last):
            self._track(x, self._processes.total(losses))
            if self._ends_here:
                model.compute_metrics(x, y, self._joined(batch, step), sample_weight=sample_weight)
            elif current_strategy.sharing() is not None:
                self._trace_metrics(x, y, sample_weight)
            with unnoted():
                for worker, variables in sorted(self._kept_by_metrics().items()):
                    self._processes.give(variables, worker)
        return model.get_metrics_result()

    def _trace_metrics(self, x: Any, y: Any, sample_weight: Any) -> None:
        """Traces updates of metrics without running them, to learn how the replicas' metrics are merged."""
        calls = self._stages.calls
        outputs = [tf.TensorSpec(calls.tensors[key].shape, calls.tensors[key].dtype) for key in calls.outputs]
        data = x, y, sample_weight
        parts = [tensor for tensor in tree.flatten(data) if tf.is_tensor(tensor)]

        def update(*tensors: Any) -> None:
            given = iter(tensors)
            made = self._packed([next(given) for _ in outputs])
            traced = tree.map_structure(lambda leaf: next(given) if tf.is_tensor(leaf) else leaf, data)
            self._model.compute_metrics(traced[0], traced[1], made, sample_weight=traced[2])

        tf.function(update, autograph=False).get_concrete_function(*outputs, *map(tf.type_spec_from_value, parts))

    def _kept_by_metrics(self) -> dict[int, list[Any]]:
        """Returns metrics' variables by the worker that updates them: a layer's metrics where the layer is called."""
        by_worker: dict[int, list[Any]] = {}
        of_layers: dict[int, int] = {}
        for stage in reversed(range(self._stages.count)):
            for called_layer in self._stages.layers(stage):
                of_layers.update({id(metric): self._table.workers[stage] for metric in models.metrics_in(called_layer)})
        for metric in self._model.metrics:
            if metric is not models.loss_tracker(self._model):
                by_worker.setdefault(of_layers.get(id(metric), self._last), []).extend(metric.variables)
        return by_worker

    def _agreed(self, data: Any) -> Any:
        """Returns a batch as tensors, after a check that the processes have the same; eager steps get arrays."""
        tensors = tree.map_structure(
            lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, data
        )
        return tensors if self._processes is None else self._processes.agreed(tensors)

    def _inputs(self, x: Any) -> list[Any]:
        """Returns the model's inputs in their order, as its ``call`` would take them."""
        return models.standardized(self._graph, x)

    def _step(
        self,
        table: Table,
        batch: MicroBatches,
        inputs: Sequence[Any],
        training: bool,
        objective: Objective | None = None,
    ) -> PipelinedStep:
        step = PipelinedStep(
            self._stages,
            table,
            self._workers,
            self._transport,
            batch,
            inputs,
            training,
            objective,
            self._devices,
            self._recomputes,
            self._recording if training else None,
        )
        step.run()
        return step

    def _joined(self, batch: MicroBatches, step: PipelinedStep) -> Any:
        return self._packed(self._outputs(batch, step))

    def _outputs(self, batch: MicroBatches, step: PipelinedStep) -> list[Any]:
        return [batch.joined(parts) for parts in zip(*step.outputs, strict=True)]

    def _packed(self, outputs: Sequence[Any]) -> Any:
        return tree.pack_sequence_as(models.structure_of_outputs(self._graph), list(outputs))

    def _loss(self, data: Any, outputs: Sequence[Any], training: bool) -> tf.Tensor:
        x, y, sample_weight = data
        packed = self._packed(outputs)
        with _output_loss_only.set_to(True):
            given = {"x": x, "y": y, "y_pred": packed, "sample_weight": sample_weight, "training": training}
            return models.compute_loss(self._model, **given)

    def _divisors(self, data: Any, inputs: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the divisors of the whole batch's loss, if losses are computed for each micro-batch."""
        if self._table.ends_forward_first or not self._ends_here:
            return []
        divisors = divisors_of(
            self._stages, data, inputs, lambda traced, outputs: self._loss(traced, outputs, training=True)
        )
        return over_replicas(divisors, current_strategy.sharing())

    def _track(self, x: Any, loss: tf.Tensor) -> None:
        samples = tf.shape(next(tensor for tensor in tree.flatten(x) if tensor is not None))[0]
        models.loss_tracker(self._model).update_state(loss, samples)
