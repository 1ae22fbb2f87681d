"""One step of a pipeline: the actions of this process's workers, in graphs and eagerly.

In a graph, each action waits for the one before it in its worker's row. Otherwise TensorFlow would begin every action
that it can, and keep the activations of all micro-batches at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.engine import host_calls
from tfdist.model_parallel.model_calls import ModelCall, clear_losses, trainable_variables
from tfdist.model_parallel.placed_gradients import placed
from tfdist.pipeline.actions import Action, ActionKind, Step, Transfer, WorkerExchange
from tfdist.pipeline.gradients import GradientSums
from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.pipeline.objective import Objective
from tfdist.pipeline.recording import Recording
from tfdist.pipeline.stage_state import StageState
from tfdist.pipeline.stages import Stages
from tfdist.pipeline.table import Table
from tfdist.pipeline.transport import Transport
from tfdist.private.keras import backend
from tfdist.private.models import logits_of
from tfdist.strategies.divided import weight_parts


@dataclass
class _TapeSegment:
    """Calls whose gradients are computed together.

    Attributes:
        calls: some of the stage's calls.
        tape: gradient tape that has recorded the calls.
        sources: keys of the differentiable tensors that the calls took.
        variables: trainable variables of the calls' layers.
        losses: losses that the layers added.
        upstream: gradients of the calls' outputs by key, once they are known.
        of_logits: gradients of the logits of model outputs that the calls made, by key.
    """

    calls: Sequence[ModelCall]
    tape: tf.GradientTape
    sources: list[int]
    variables: list[Any]
    losses: list[tf.Tensor]
    upstream: dict[int, tf.Tensor] = field(default_factory=dict)
    of_logits: dict[int, tf.Tensor] = field(default_factory=dict)


@dataclass
class _KeptTensors:
    """The tensors that a forward pass keeps for the backward pass.

    Attributes:
        values: tensors by their keys.
        parts: the stage's parts in their order; None if the forward pass is to be repeated.
    """

    values: dict[int, Any]
    parts: list[_TapeSegment] | None


class PipelinedStep:
    """A step that runs the rows of some workers of a table.

    Args:
        stages: the model's stages.
        table: the actions of the step, without a deadlock.
        workers: numbers of this process's workers.
        transport: carries tensors between workers of different processes; None if all workers are in this process.
        batch: the batch in micro-batches.
        inputs: the model's inputs for the whole batch, in their order. Each stage takes those that it needs.
        training: ``training`` argument of the model's ``call``.
        objective: the loss to minimize; None without backward passes.
        devices: device of each worker; None for the default device.
        recomputes: whether forward passes keep only their inputs, and backward passes repeat them.
        recording: takes the times of the actions; None if they are not recorded.

    Attributes:
        gradients: gradients of the variables of this process's stages, after `run`.
        added_losses: losses that layers and regularizers of this process's stages have added, after `run`; those of
            layers are weighted by samples.
    """

    def __init__(
        self,
        stages: Stages,
        table: Table,
        workers: Sequence[int],
        transport: Transport | None,
        batch: MicroBatches,
        inputs: Sequence[Any],
        training: bool,
        objective: Objective | None = None,
        devices: Sequence[str] | None = None,
        recomputes: bool = False,
        recording: Recording | None = None,
    ) -> None:
        self.gradients = GradientSums()
        self._outputs: dict[int, list[Any]] = {}
        self.added_losses: list[tf.Tensor] = []
        self._stages = stages
        self._calls = stages.calls
        self._table = table
        self._workers = tuple(workers)
        self._transport = transport
        self._batch = batch
        self._inputs = dict(zip(stages.calls.inputs, inputs, strict=True))
        self._training = training
        self._objective = objective
        self._devices = devices
        self._recomputes = recomputes
        self._stamps = None if recording is None else recording.of_step(table.workers)
        local_stages = [stage for stage in range(stages.count) if table.workers[stage] in self._workers]
        self._states = {stage: StageState(stages, stage, batch) for stage in local_stages}
        self._kept: dict[tuple[int, int], _KeptTensors] = {}
        self._results: dict[Action, dict[int, Any]] = {}
        self._arrived: dict[Transfer, list[tf.Tensor]] = {}
        self._before: dict[int, list[Any]] = {worker: [] for worker in workers}

    @property
    def outputs(self) -> list[list[Any]]:
        """The model's outputs for each micro-batch, in order; empty in a process without the last stage."""
        return [self._outputs[number] for number in sorted(self._outputs)]

    @property
    def last(self) -> list[Any]:
        """The operations that ran last in each worker's row, for control dependencies; empty if steps are eager."""
        return [operation for operations in self._before.values() for operation in operations]

    @tf.autograph.experimental.do_not_convert
    def run(self) -> None:
        """Runs all actions and exchanges of this process's workers."""
        left = {worker: self._table.steps(worker, self._workers) for worker in self._workers}
        done: set[Action] = set()
        while any(left.values()):
            for worker, steps in left.items():
                while steps and self._can_begin(steps[0], done):
                    step = steps.pop(0)
                    with self._in_order(worker):
                        self._before[worker] = self._do(step) or self._before[worker]
                    if isinstance(step, Action):
                        done.add(step)
        for stage, state in self._states.items():
            with self._in_order(self._table.workers[stage]):
                self._regularize(stage)
                state.assign()
            clear_losses(self._stages.calls_of(stage))
        if self._recomputes and not tf.executing_eagerly():
            # A repeated forward pass reads weights late. TensorFlow's dependency optimizer may drop the order between
            # such a read and an update that does not need the read value.
            self.gradients.wait_for(self.last)
        if self._stamps is not None:
            self._stamps.close()

    def _can_begin(self, step: Step, done: set[Action]) -> bool:
        """Returns whether the actions of this process's workers that a step needs are done or traced."""
        if not isinstance(step, Action):
            return True
        needed = [action for action in self._table.needs(step) if self._table.workers[action.stage] in self._workers]
        return done.issuperset(needed)

    @contextlib.contextmanager
    def _in_order(self, worker: int) -> Iterator[None]:
        device = contextlib.nullcontext() if self._devices is None else placed(self._devices[worker])
        with tf.control_dependencies(self._before[worker]), device:
            yield

    def _do(self, step: Step) -> list[Any]:
        """Runs an action or an exchange; returns what the next one has to wait for, if anything new."""
        if isinstance(step, WorkerExchange):
            return self._exchange(step)
        taken = [
            self._received(Transfer(needed, step.stage))
            for needed in self._table.needs(step)
            if needed.stage != step.stage
        ]
        if self._stamps is None:
            return self._act(step, taken)
        return self._stamps.around(
            step, [tensor for tensors in taken for tensor in tensors.values()], lambda: self._act(step, taken)
        )

    def _act(self, action: Action, taken: list[dict[int, Any]]) -> list[Any]:
        """Computes an action from results of other stages; returns what the next one has to wait for."""
        do: Callable[[Action, list[dict[int, Any]]], list[Any]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUTS: self._backward,
            ActionKind.WEIGHTS: self._weights,
        }[action.kind]
        made = [result for result in do(action, taken) if result is not None]
        return [] if tf.executing_eagerly() else [tf.group(*(getattr(result, "values", result) for result in made))]

    # Exchanges.

    def _exchange(self, exchange: WorkerExchange) -> list[Any]:
        """Sends and receives; returns what the next step has to wait for."""
        assert self._transport is not None
        graph = tf.compat.v1.get_default_graph()
        before = 0 if tf.executing_eagerly() else len(graph.get_operations())
        received = self._transport.exchange(
            [
                (transfer, self._worker(transfer.destination), self._tensors_of_transfer(transfer))
                for transfer in exchange.sent
            ],
            [
                (transfer, self._worker(transfer.result_of.stage), self._specs(transfer))
                for transfer in exchange.expected
            ],
            [
                (transfer, self._worker(transfer.result_of.stage), self._specs(transfer))
                for transfer in exchange.received
            ],
        )
        self._arrived.update(zip(exchange.received, received, strict=True))
        if tf.executing_eagerly():
            return []
        return [operation for operation in graph.get_operations()[before:] if operation.type in host_calls.OPERATIONS]

    def _worker(self, stage: int) -> int:
        return self._table.workers[stage]

    def _edge_keys(self, transfer: Transfer) -> tuple[int, ...]:
        """Returns the keys of the tensors that a transfer carries."""
        action, other = transfer.result_of, transfer.destination
        if action.kind is ActionKind.FORWARD:
            return self._stages.sent((action.stage, other))
        return self._stages.differentiable((other, action.stage))

    def _specs(self, transfer: Transfer) -> list[tf.TensorSpec]:
        keys = self._edge_keys(transfer)
        if transfer.result_of.kind is ActionKind.FORWARD:
            return self._stages.specs(keys)
        return [tf.TensorSpec(self._calls.tensors[key].shape, self._calls.tensors[key].dtype) for key in keys]

    def _tensors_of_transfer(self, transfer: Transfer) -> list[tf.Tensor]:
        """Returns the tensors of a transfer, each followed by its mask if it has one."""
        results = self._results[transfer.result_of]
        tensors = []
        for key in self._edge_keys(transfer):
            value = results[key]
            tensors.append(tf.cast(value, self._calls.tensors[key].dtype))
            if transfer.result_of.kind is ActionKind.FORWARD and self._stages.has_mask(key):
                tensors.append(backend.get_keras_mask(value))
        return tensors

    def _received(self, transfer: Transfer) -> dict[int, Any]:
        """Returns the results of an action of another stage, by key."""
        action, stage = transfer.result_of, transfer.destination
        if self._worker(action.stage) == self._worker(stage):
            results = self._results[action]
            return {key: results[key] for key in self._edge_keys(transfer)}
        # Results of another worker of this process are copied to the device of this worker.
        tensors = iter(self._tensors_of_transfer(transfer) if action in self._results else self._arrived.pop(transfer))
        results = {}
        for key in self._edge_keys(transfer):
            results[key] = tf.identity(next(tensors))
            if action.kind is ActionKind.FORWARD and self._stages.has_mask(key):
                backend.set_keras_mask(results[key], next(tensors))
        return results

    # Computation.

    def _forward(self, action: Action, taken: list[dict[int, Any]]) -> list[Any]:
        stage, _, number = action
        calls = self._stages.calls_of(stage)
        values = {key: self._batch.part(self._inputs[key], number) for key in self._stages.inputs(stage)}
        for received in taken:
            values.update(received)
        begun = dict(values)
        with self._states[stage].of(number):
            if self._objective is None or self._recomputes:
                losses = self._run(calls, values)
                parts = None
            else:
                parts = self._all_recorded(stage, values)
                losses = [loss for part in parts for loss in part.losses]
        weight = self._batch.weight(number)
        self.added_losses += [tf.cast(loss, tf.float64) * weight for loss in losses]
        if self._objective is not None:
            self._kept[stage, number] = _KeptTensors(begun if parts is None else values, parts)
        made = [key for begin, end in self._stages.edges if begin == stage for key in self._stages.sent((begin, end))]
        self._results[action] = {key: values[key] for key in made}
        for key in made:
            if not isinstance(values[key], tf.Tensor):
                raise TypeError(
                    f"only dense tensors go from one stage to another; got a {type(values[key]).__name__} from stage "
                    f"{stage}, which ends with {calls[-1].name}. Cut the model elsewhere."
                )
        ends = [values[key] for key in made]
        if stage == self._stages.count - 1:
            outputs = [values[key] for key in self._calls.outputs]
            self._outputs[number] = outputs
            if self._objective is not None:
                self._objective.take(number, outputs)
            ends += outputs
        return [*ends, *losses]

    def _run(self, calls: Sequence[ModelCall], values: dict[int, Any]) -> list[tf.Tensor]:
        """Runs calls; returns the losses that their layers add."""
        self._calls.run(calls, values, self._training)
        return _added_losses()

    def _all_recorded(self, stage: int, values: dict[int, Any]) -> list[_TapeSegment]:
        calls = self._stages.calls_of(stage)
        groups = [[call] for call in calls] if self._table.is_divided else [list(calls)]
        return [self._recorded(group, values) for group in groups]

    def _computed(self, stage: int, number: int) -> _KeptTensors:
        """Returns what the forward pass kept, after repeating it if it kept only its inputs."""
        kept = self._kept[stage, number]
        if kept.parts is None:
            with self._states[stage].again(number):
                kept.parts = self._all_recorded(stage, kept.values)
        return kept

    def _recorded(self, calls: list[ModelCall], values: dict[int, Any]) -> _TapeSegment:
        taken = [key for key in self._calls.sources(calls) if key not in self._inputs]
        sources = [key for key in taken if _is_differentiable(values[key])]
        variables = trainable_variables(call.operation for call in calls)
        with tf.GradientTape(persistent=self._table.is_divided) as tape:
            tape.watch([values[key] for key in sources])
            losses = self._run(calls, values)
        return _TapeSegment(calls, tape, sources, variables, losses)

    def _backward(self, action: Action, taken: list[dict[int, Any]]) -> list[Any]:
        """Computes gradients of a stage's inputs, and of its weights unless they come later."""
        assert self._objective is not None
        stage, kind, number = action
        upstream: dict[int, Any] = {}
        of_logits: dict[int, Any] = {}

        def add(gradients: dict[int, Any]) -> None:
            for key, gradient in gradients.items():
                if gradient is not None:
                    dense = tf.convert_to_tensor(gradient)
                    upstream[key] = dense if key not in upstream else upstream[key] + dense

        for received in taken:
            add(received)
        if stage == self._stages.count - 1:
            outputs, of_variables = self._objective.gradients(number)
            for key, pair in zip(self._calls.outputs, outputs, strict=True):
                add({key: pair.output})
                of_logits[key] = pair.logits
            for variable, gradient in of_variables:
                self.gradients.add(variable, gradient)
        results: list[Any] = []
        kept = self._computed(stage, number)
        assert kept.parts is not None
        if kind is ActionKind.BACKWARD:
            del self._kept[stage, number]
        for place, part in reversed(list(enumerate(kept.parts))):
            made = [key for call in part.calls for key in call.outputs]
            part.upstream = {key: upstream[key] for key in made if key in upstream}
            part.of_logits = {key: of_logits[key] for key in made if of_logits.get(key) is not None}
            variables = [] if kind is ActionKind.INPUTS else part.variables
            of_sources, of_variables = self._gradients(kept, part, number, part.sources, variables)
            add(dict(zip(part.sources, of_sources, strict=True)))
            results += of_sources
            for variable, gradient in zip(variables, of_variables, strict=True):
                results.append(self.gradients.add(variable, gradient, (stage, place)))
        self._results[action] = self._for_earlier_stages(stage, kept, upstream)
        return [*results, *self._results[action].values()]

    def _for_earlier_stages(self, stage: int, kept: _KeptTensors, upstream: dict[int, Any]) -> dict[int, Any]:
        gradients = {}
        for begin, end in self._stages.edges:
            for key in self._stages.differentiable((begin, end)) if end == stage else ():
                gradient = upstream.get(key)
                gradients[key] = tf.zeros_like(kept.values[key]) if gradient is None else tf.convert_to_tensor(gradient)
        return gradients

    def _regularize(self, stage: int) -> None:
        """Adds the weights' regularization losses, once in each step, in the first of the stages that have a weight."""
        for variable in trainable_variables(self._stages.layers(stage)):
            if variable.regularizer is None or self._stages.homes[id(variable)][0] != stage:
                continue
            with tf.GradientTape() as tape:
                loss = variable.regularizer(variable)
            self.added_losses.append(tf.cast(loss, tf.float64))
            if self._objective is not None:
                scale = tf.cast(self._objective_scale(), loss.dtype)
                self.gradients.add(
                    variable, tape.gradient(loss, weight_parts.source_of(variable), output_gradients=scale)
                )

    def _weights(self, action: Action, taken: list[dict[int, Any]]) -> list[Any]:
        stage, _, number = action
        kept = self._kept.pop((stage, number))
        assert kept.parts is not None
        sums = []
        for place, part in enumerate(kept.parts):
            _, gradients = self._gradients(kept, part, number, [], part.variables)
            for variable, gradient in zip(part.variables, gradients, strict=True):
                sums.append(self.gradients.add(variable, gradient, (stage, place)))
        return sums

    def _gradients(
        self, kept: _KeptTensors, part: _TapeSegment, number: int, sources: list[int], variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Computes gradients of what calls took, and of variables."""
        logits = [logits_of(kept.values[key]) for key in part.of_logits]
        targets = [kept.values[key] for key in part.upstream] + logits + part.losses
        wanted = [kept.values[key] for key in sources] + [weight_parts.source_of(variable) for variable in variables]
        if not targets or not wanted:
            return [None] * len(sources), [None] * len(variables)
        weight = self._batch.weight(number)
        upstream = [tf.cast(gradient, kept.values[key].dtype) for key, gradient in part.upstream.items()]
        upstream += part.of_logits.values()
        upstream += [tf.cast(weight * self._objective_scale(), loss.dtype) for loss in part.losses]
        gradients = part.tape.gradient(targets, wanted, output_gradients=upstream)
        return gradients[: len(sources)], gradients[len(sources) :]

    def _objective_scale(self) -> tf.Tensor:
        assert self._objective is not None
        return tf.cast(self._objective.scale, tf.float64)


def _added_losses() -> list[tf.Tensor]:
    """Returns the losses that layers have added since the last call, in the context of a `StageState`."""
    scope = backend.get_stateless_scope()
    losses = list(scope.losses)
    scope.losses.clear()
    return losses


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)
