"""Keras under a strategy whose processes train in rounds: what follows an update, and the end of an epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.keras import tree
from tfdist.seams.once import Once
from tfdist.seams.optimizer import OptimizerCall
from tfdist.seams.trainer import ModelCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.keras import keras_steps, keras_variables
from tfdist.strategies.round_abilities import TrainsInRounds


@Once
def install() -> None:
    """Installs the hooks."""
    keras_hooks.add_for_optimizers(FollowedByExchanges)
    keras_hooks.add(Settled)


class FollowedByExchanges(keras_hooks.OptimizerHooks[TrainsInRounds]):
    """Updates count, and an exchange may follow them."""

    ability = TrainsInRounds

    def apply(self, call: OptimizerCall) -> contextlib.AbstractContextManager[None] | None:
        """Tells the strategy of the update, unless it is a part of another optimizer's."""
        return self._told(call) if call.is_outermost else None

    @contextlib.contextmanager
    def _told(self, call: OptimizerCall) -> Iterator[None]:
        optimizer = call.optimizer
        if not optimizer.built:
            self.extended.build(optimizer, list(call.arguments["trainable_variables"]))
        self.extended.step_begins(optimizer)
        yield
        self.extended.step_taken(optimizer)


class Rounds(keras.callbacks.Callback):
    """Begins `fit`, which may follow a loop or an interrupted `fit`, with equal weights, and each epoch with a round.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: TrainsInRounds) -> None:
        super().__init__()
        self._extended = extended

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        settle(self.model, self._extended)
        self._extended.begin_rounds(self.model, anew=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        self._extended.begin_rounds(self.model, anew=False)
        self.model._tfdist_in_rounds = True


def settle(model: Any, extended: TrainsInRounds) -> None:
    """Makes the weights, layers' state and moving averages of a model equal on all processes, which all call it.

    Layers' state, such as moving statistics, is averaged here only. It does not affect training, and where it is linear
    in what it is made of, as in batch normalization, averaging it once is as good as averaging it in each round.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    extended.settle(model)
    keras_variables.average_state(model, extended)
    averages = extended.moving_averages(model)
    means = extended.bridge.all_reduce([tf.convert_to_tensor(one.value) for one in averages], mean=True)
    for variable, mean in zip(averages, means, strict=True):
        variable.assign(mean)


class Settled(keras_hooks.ModelHooks[TrainsInRounds]):
    """What reads weights reads equal ones, and logs are of all processes."""

    ability = TrainsInRounds

    def evaluate(self, call: ModelCall) -> None:
        """Makes weights equal: `fit` does so, but a custom training loop does not."""
        if not call.is_within_fit:
            settle(call.model, self.extended)

    predict = evaluate

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """`fit` and epochs begin with a round."""
        return [Rounds(self.extended), *given]

    def epoch_logs(self, call: ModelCall) -> None:
        """Makes weights equal, and logs."""
        model = call.model
        if getattr(model, "_tfdist_in_rounds", False):
            model._tfdist_in_rounds = False
            settle(model, self.extended)
        call.replace(lambda: self._of_all(model, call.arguments["logs"], call.inner))

    def _of_all(self, model: Any, logs: Any, original: Callable[[], Any]) -> Any:
        given = logs if isinstance(logs, dict) else {}
        own = {name for name in given if name not in keras_steps.names_of_results(self.extended)}
        # A process that had no batch has no logs, and does not know which of those of others are means.
        names = {"logs": ", ".join(sorted(own)) if isinstance(logs, dict) else "none"}
        if self.extended.everyone.compare("names of logs", names):
            return {**given, **model.get_metrics_result()}
        if not isinstance(logs, dict):
            return original()
        results = model.get_metrics_result()
        merged = (results.keys() & logs.keys()) - own
        means = _averaged({name: value for name, value in logs.items() if name not in merged}, self.extended)
        return {name: results[name] if name in merged else means[name] for name in logs}


def _averaged(logs: dict[str, Any], extended: TrainsInRounds) -> dict[str, Any]:
    """Logs of steps that a user wrote, as means over processes as far as they are floating-point numbers."""
    values = tree.flatten(logs)
    tensors = [tf.convert_to_tensor(value) for value in values]
    floating = [place for place, one in enumerate(tensors) if one.dtype.is_floating]
    means = extended.bridge.all_reduce([tf.cast(tensors[place], tf.float64) for place in floating], mean=True)
    for place, mean in zip(floating, means, strict=True):
        values[place] = mean
    return tree.pack_sequence_as(logs, values)
