"""Keras hooks for parameter servers: servers make updates, and evaluation and saving read the newest parameters."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.private import optimizers
from tfdist.private.keras import base_optimizer
from tfdist.seams import optimizer
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.data.shares import batch_size
from tfdist.strategies.keras import keras_backup, keras_metrics
from tfdist.strategies.keras.keras_assignments import Assigned
from tfdist.strategies.server_abilities import UpdatesOnServers
from tfdist.strategies.servers import keras_shared_data
from tfdist.strategies.servers.dealt_batches import Ticketed
from tfdist.thread_values import ThreadValue

log = logging.getLogger("tfdist")

_MIN_BOUND = 2
"""Least bound for steps with several optimizers. After a pause, a worker's clock for each optimizer is set to that of
the slowest worker, which may take as many steps as the bound and one more between two optimizers. With a lower bound,
one worker's first update and another one's second update could wait for each other."""


class _Step:
    """A training step that is traced, or run eagerly.

    Args:
        samples: number of samples in the step, a scalar tensor.
        ticket: ticket of the batch, an int64 scalar; None if the batch was not dealt.

    Attributes:
        samples: number of samples in the step.
        always_updates: whether each step of the graph makes the update that has the ticket.
    """

    def __init__(self, samples: tf.Tensor, ticket: tf.Tensor | None) -> None:
        self.samples = samples
        self.always_updates = False
        self._ticket = ticket
        self._is_taken = False
        self._optimizers: set[int] = set()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def note(self, optimizer: Any, bound: int | None) -> None:
        """Notes that an optimizer makes an update.

        Args:
            optimizer: a Keras optimizer.
            bound: the bound of `BoundedStaleness`; None in other modes.

        Raises:
            ValueError: the step has several optimizers, and the bound is so low that workers could wait for each other.
        """
        self._optimizers.add(id(optimizer))
        if bound is not None and bound < _MIN_BOUND and len(self._optimizers) > 1:
            raise ValueError(
                f"steps with several optimizers, as of a GAN, need BoundedStaleness({_MIN_BOUND}) or more; got "
                f"BoundedStaleness({bound}): after a pause, a worker's clocks may differ by {_MIN_BOUND} between "
                "optimizers"
            )

    def ticket(self, waits: bool) -> tf.Tensor | None:
        """Returns the ticket for the first update of the step; None for others.

        Args:
            waits: whether workers wait for each other.

        Raises:
            ValueError: the step has several updates, and workers wait for each other.
        """
        if self._ticket is None:
            return None
        if self._is_taken:
            if waits:  # a worker's first update and another one's second would wait for each other
                raise ValueError(
                    'data="shared" needs steps with one update in modes in which workers wait for each other. Use '
                    'Asynchronous() or SoftSync(), or data="own".'
                )
            return None
        self._is_taken = True
        self.always_updates = tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self._graph
        return self._ticket


_step: ThreadValue[_Step | None] = ThreadValue(None)
"""The innermost step that a thread traces, or runs eagerly; None outside of steps."""


@Once
def install() -> None:
    """Installs the seams."""
    optimizer.points.provide([ServerOptimizerHooks], _hooks_of)
    replace(base_optimizer.BaseOptimizer, "finalize_variable_values", _finalize_on_servers)
    replace(tf.train.Checkpoint, "_write", _with_newest_state)
    keras_hooks.add(ServerModelHooks)


class ServerOptimizerHooks(optimizer.OptimizerHooks):
    """Hooks that have servers make an optimizer's updates.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: UpdatesOnServers) -> None:
        self._extended = extended

    def apply(self, call: optimizer.OptimizerCall) -> None:
        """Sends gradients to servers in place of the update here."""
        if call.applies_itself and len(call.arguments["grads"]):
            call.replace(lambda: self._applied(call))

    def _applied(self, call: optimizer.OptimizerCall) -> None:
        given, extended = call.arguments["trainable_variables"], self._extended
        variables = optimizers.variables_of(call.optimizer) if given is None else list(given)
        step = _step.value
        samples, ticket = (1, None) if step is None else (step.samples, step.ticket(extended.workers_wait))
        if step is not None:
            step.note(call.optimizer, extended.bound)
        gradients = list(call.arguments["grads"])
        extended.update_on_servers(call.optimizer, gradients, variables, samples, call.inner, ticket)


def _hooks_of(owner: Any) -> list[ServerOptimizerHooks]:
    extended = _extended_of(owner) or current_strategy.current(UpdatesOnServers)
    return [] if extended is None else [ServerOptimizerHooks(extended)]


def _extended_of(optimizer: Any) -> UpdatesOnServers | None:
    """Returns the `extended` of the strategy that an optimizer was made under, if servers make its updates."""
    return current_strategy.of_strategy(_strategy_of(optimizer), UpdatesOnServers)


def _strategy_of(optimizer: Any) -> Any:
    return optimizers.strategy_of(getattr(optimizer, "inner_optimizer", optimizer))


def _finalize_on_servers(original: Callable[..., Any]) -> Callable[..., Any]:
    def finalize_variable_values(self: Any, var_list: Any) -> None:
        extended = _extended_of(self)
        link = extended.link_of(self) if extended is not None and self.use_ema else None
        if link is None or link.averages_here:
            return original(self, var_list)
        return link.finalize()

    return finalize_variable_values


def _with_newest_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has checkpoints written with the values and the optimizers' variables that the servers have."""

    def write(self: Any, file_prefix: Any, options: Any = None) -> Any:
        with contextlib.ExitStack() as stack:
            for link in _links_within(self):
                stack.enter_context(link.newest_state())
            return original(self, file_prefix, options)

    return write


def _links_within(checkpoint: tf.train.Checkpoint) -> list[Any]:
    """Returns the links of the models and optimizers that a checkpoint holds."""
    links: dict[int, Any] = {}
    for item in tf.train.TrackableView(checkpoint).descendants():
        found: list[Any] = []
        if isinstance(item, keras.Model) and (extended := current_strategy.of_model(item, UpdatesOnServers)):
            found = extended.links(item)
        elif isinstance(item, base_optimizer.BaseOptimizer) and (extended := _extended_of(item)):
            found = [extended.link_of(item)]
        links |= {id(link): link for link in found if link is not None}
    return list(links.values())


class ServerModelHooks(keras_hooks.ModelHooks[UpdatesOnServers]):
    """Hooks that tell steps what to send to servers, and read the servers' values before the model is read."""

    ability = UpdatesOnServers

    def make_function(self, call: TrainerCall) -> None:
        """Gives steps their number of samples, by which gradients are averaged.

        The number also orders an update behind its batch: Keras runs what does not depend on a batch once more where
        the data end.
        """
        model, step_function = call.model, call.arguments["step_function"]

        def step(data: Any) -> Any:
            ticket, batch = data if isinstance(data, Ticketed) else (None, data)
            assigned = Assigned()
            with keras_shared_data.refreshed_step(model, ticket):
                current_step = _Step(batch_size(batch), ticket)
                with _step.set_to(current_step), assigned.noted():
                    outputs = step_function(batch)
                for variable in {
                    id(variable): variable for metric in model.metrics for variable in metric.variables
                }.values():
                    keras_metrics.infer_merge_rule(variable, assigned.values.get(id(variable), []))
                if ticket is not None and not current_step.always_updates:
                    keras_shared_data.skip_batch_without_update(model, ticket)
                return outputs

        call.arguments["step_function"] = step

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Adds the callback for pauses between epochs; workers other than the chief back up only the epoch's number.

        Raises:
            ValueError: a callback swaps weights with averages, which are on the servers.
        """
        if any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in given):
            raise ValueError(
                "keras.callbacks.SwapEMAWeights swaps a model's weights with the averages that its optimizer keeps, "
                "but those are on the parameter servers, where other workers go on with the weights. Leave the "
                "callback out: with use_ema=True, fit ends with the averages. To validate them before, give "
                "ModelCheckpoint a file and load it elsewhere: it has both."
            )
        return [SuspendBetweenEpochs(self.extended), *keras_backup.on_servers(given, self.extended)]

    @contextlib.contextmanager
    def evaluate(self, call: TrainerCall) -> Iterator[None]:
        """Has `evaluate` and `predict` read one version, the newest when they begin; no worker waits for them."""
        with contextlib.ExitStack() as stack:
            for link in self.extended.links(call.model):
                stack.enter_context(link.newest())
            if self.extended.observes:
                self.extended.begin_epoch(call.model)
            yield

    predict = evaluate

    @contextlib.contextmanager
    def save(self, call: TrainerCall) -> Iterator[None]:
        """Has models saved with the newest values, and with the optimizer's variables that the servers have."""
        if self.extended.worker:
            _warn_only_chief_writes(self.extended, call.name)
        with contextlib.ExitStack() as stack:
            for link in self.extended.links(call.model):
                stack.enter_context(link.newest_state())
            yield

    save_weights = export = save


def _warn_only_chief_writes(extended: UpdatesOnServers, name: str) -> None:
    """Warns once that the chief writes: unlike ranks with collectives, workers need not save together."""
    if name not in extended.reported:
        extended.reported.add(name)
        log.warning(
            "tfdist: `model.%s` writes nothing on this worker: the chief writes, when its script makes this call. Make "
            "it on the chief; on other workers it has no effect.",
            name,
        )


class SuspendBetweenEpochs(keras_hooks.StrategyCallback[UpdatesOnServers]):
    """Callback that lets other workers go on between this worker's epochs, and reads the newest values before each."""

    def __init__(self, extended: UpdatesOnServers) -> None:
        super().__init__(extended)
        self._names = ["loss"]

    def set_params(self, params: Any) -> None:
        """Sets the progress bar's end to that of the epoch, whichever workers get its batches."""
        if self.model is not None and (shared := keras_shared_data.shared_by(self.model)) is not None:
            params["steps"] = shared.source.batches
        super().set_params(params)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads the newest values, and takes part in the epoch if its batches are dealt."""
        self._extended.begin_epoch(self.model)
        if self.model.run_eagerly or tf.config.functions_run_eagerly():
            self._extended.begin_eager_steps(self.model)
        for link in self._extended.links(self.model):
            link.refresh()
        if (shared := keras_shared_data.shared_by(self.model)) is not None:
            shared.epochs.begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tells servers that nobody needs to wait for this worker's callbacks."""
        shared = keras_shared_data.shared_by(self.model)
        for link in self._extended.links(self.model):
            link.suspend()
            if shared is not None:
                link.refresh()  # all have finished the epoch; this worker's last batch was some time ago
        if shared is not None and logs is not None and not shared.has_all_logs:
            self._without_batches(shared.epochs.taken, logs)

    def _without_batches(self, taken: int, logs: Any) -> None:
        """Makes the logs NaN if this worker got no batch of the epoch: a loss of 0 would be the best one."""
        names = [name for name in logs if not name.startswith("val_")]
        if taken:
            self._names = names
        else:
            logs.update(dict.fromkeys(names or self._names, float("nan")))
            log.warning("tfdist: this worker got no batch of the epoch; its logs are NaN.")

    def on_train_end(self, logs: Any = None) -> None:
        """Tells servers that nobody needs to wait for this worker before it trains again."""
        for link in self._extended.links(self.model):
            link.suspend(is_end=True)
