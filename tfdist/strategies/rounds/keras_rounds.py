"""Keras hooks for a strategy whose processes train in rounds: after updates, and at the ends of epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.private.keras import tree
from tfdist.seams.once import Once
from tfdist.seams.optimizer import OptimizerCall
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.keras import keras_steps, keras_variables
from tfdist.strategies.round_abilities import TrainsInRounds


@Once
def install() -> None:
    """Installs the hooks."""
    keras_hooks.add_for_optimizers(RoundOptimizerHooks)
    keras_hooks.add(RoundModelHooks)


class RoundOptimizerHooks(keras_hooks.StrategyOptimizerHooks[TrainsInRounds]):
    """Hooks that count the updates of optimizers, after which an exchange may follow."""

    ability = TrainsInRounds

    def apply(self, call: OptimizerCall) -> contextlib.AbstractContextManager[None] | None:
        """Reports the update to the strategy, unless the optimizer is a part of another one."""
        return self._told(call) if call.is_outermost else None

    @contextlib.contextmanager
    def _told(self, call: OptimizerCall) -> Iterator[None]:
        optimizer = call.optimizer
        if not optimizer.built:
            self.extended.build(optimizer, list(call.arguments["trainable_variables"]))
        self.extended.step_begins(optimizer)
        yield
        self.extended.step_taken(optimizer)


class BeginRounds(keras_hooks.StrategyCallback[TrainsInRounds]):
    """Callback that begins `fit`, also after a custom loop, with equal weights, and each epoch with a round."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes weights equal, and begins a round with them."""
        settle(self.model, self._extended)
        self._extended.begin_rounds(self.model, anew=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins a round where none is under way."""
        self._extended.begin_rounds(self.model, anew=False)
        self.model._tfdist_in_rounds = True


def settle(model: Any, extended: TrainsInRounds) -> None:
    """Makes a model's weights, layers' state and moving averages equal on all processes; called by all of them.

    Layers' state, such as moving statistics, is averaged here only. It does not affect training, and where it is linear
    in the statistics of batches, as in batch normalization, averaging it once is as good as in each round.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    extended.settle(model)
    keras_variables.average_state(model, extended)
    averages = extended.moving_averages(model)
    means = extended.bridge.all_reduce([tf.convert_to_tensor(average.value) for average in averages], mean=True)
    for variable, mean in zip(averages, means, strict=True):
        variable.assign(mean)


class RoundModelHooks(keras_hooks.ModelHooks[TrainsInRounds]):
    """Hooks that make weights equal before they are read, and have logs cover all processes."""

    ability = TrainsInRounds

    def evaluate(self, call: TrainerCall) -> contextlib.AbstractContextManager[None] | None:
        """Makes weights equal: `fit` does so for its validation, but neither a callback does nor a custom loop."""
        if call.is_within_fit:
            return None
        settle(call.model, self.extended)
        return _outside_rounds(call.model)

    predict = evaluate

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Adds the callback that begins rounds."""
        return [BeginRounds(self.extended), *given]

    def epoch_logs(self, call: TrainerCall) -> None:
        """Makes weights equal, and replaces the logs by those of all processes."""
        model = call.model
        if getattr(model, "_tfdist_in_rounds", False):
            model._tfdist_in_rounds = False
            settle(model, self.extended)
        call.replace(lambda: self._of_all(model, call.arguments["logs"], call.inner))

    def _of_all(self, model: Any, logs: Any, original: Callable[[], Any]) -> Any:
        given = logs if isinstance(logs, dict) else {}
        step = keras_steps.step_of(logs, self.extended)
        custom = {name for name in given if step is None or name not in step.names_of_results}
        # A process that had no batch has no logs, and does not know what those of other processes are made of.
        names = {"logs": ", ".join(sorted(custom)) if given else "none"}
        if self.extended.all_processes.compare("names of logs", names):
            return {**given, **model.get_metrics_result()}
        if not given:
            return original()
        results = logs if step is None else step.merged(logs)
        means = _averaged({name: results[name] for name in custom}, self.extended)
        return {name: means[name] if name in custom else results[name] for name in logs}


@contextlib.contextmanager
def _outside_rounds(model: Any) -> Iterator[None]:
    """Context of a call whose logs are not those of the epoch that it may be made in."""
    before, model._tfdist_in_rounds = getattr(model, "_tfdist_in_rounds", False), False
    try:
        yield
    finally:
        model._tfdist_in_rounds = before


def _averaged(logs: dict[str, Any], extended: TrainsInRounds) -> dict[str, Any]:
    """Returns the logs of a user's own steps, with floating-point numbers averaged over samples of all processes."""
    values = tree.flatten(logs)
    tensors = [tf.convert_to_tensor(value) for value in values]
    floating = [place for place, tensor in enumerate(tensors) if tensor.dtype.is_floating]
    is_shared = extended.has_several_replicas
    samples = tf.cast(extended.shares.total() if is_shared else 1, tf.float64)
    weights = tf.stack([samples, 1.0])  # the last step may be one that has found no batch, on all processes
    terms = [tf.cast(tensors[place], tf.float64) * weights for place in floating]
    *sums, everyone = extended.bridge.all_reduce([*terms, weights])
    kind = 0 if everyone[0] > 0 else 1
    for place, total in zip(floating, sums, strict=True):
        values[place] = total[kind] / everyone[kind]
    return tree.pack_sequence_as(logs, values)
