"""Keras under a strategy whose processes train in rounds: what follows an update, and the end of an epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.keras import base_optimizer, base_trainer, tf_trainer, tree
from tfdist.seams.registry import replace
from tfdist.strategies import at_work, keras_steps, keras_variables
from tfdist.strategies.abilities import AveragesState
from tfdist.strategies.round_abilities import TrainsInRounds


class _Applying(threading.local):
    """Whether this thread is applying gradients: an optimizer may contain others."""

    def __init__(self) -> None:
        self.under_way = False


_applying = _Applying()


def install() -> None:
    """Installs the seams."""
    optimizers = [base_optimizer.BaseOptimizer, keras.optimizers.LossScaleOptimizer]
    if hasattr(keras.optimizers, "MultiOptimizer"):
        optimizers.append(keras.optimizers.MultiOptimizer)
    for optimizer in optimizers:  # each has an `apply` of its own, which the others call
        replace(optimizer, "apply", _followed_by_exchanges)
    replace(base_trainer.Trainer, "_get_metrics_result_or_logs", _of_settled_weights)
    for name in ("evaluate", "predict"):
        replace(tf_trainer.TensorFlowTrainer, name, _of_equal_weights)


def _followed_by_exchanges(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        extended = at_work.current(TrainsInRounds)
        if extended is None or tf.distribute.get_replica_context() is None or _applying.under_way:
            return original(self, grads, trainable_variables)
        if not self.built:
            extended.build(self, list(trainable_variables))
        extended.step_begins(self)
        _applying.under_way = True
        try:
            result = original(self, grads, trainable_variables)
        finally:
            _applying.under_way = False
        extended.step_taken(self)
        return result

    return apply


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
    if isinstance(extended, AveragesState):
        keras_variables.average_state(model, extended)
    averages = extended.moving_averages(model)
    means = extended.bridge.all_reduce([tf.convert_to_tensor(one.value) for one in averages], mean=True)
    for variable, mean in zip(averages, means, strict=True):
        variable.assign(mean)


def _of_settled_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras asks for an epoch's logs when its steps have been taken, before validation and callbacks."""

    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        extended = at_work.of_model(self, TrainsInRounds)
        if extended is None:
            return original(self, logs)
        if getattr(self, "_tfdist_in_rounds", False):
            self._tfdist_in_rounds = False
            settle(self, extended)
        given = logs if isinstance(logs, dict) else {}
        own = {name for name in given if name not in keras_steps.names_of_results(extended)}
        # A process that had no batch has no logs, and does not know which of those of others are means.
        names = {"logs": ", ".join(sorted(own)) if isinstance(logs, dict) else "none"}
        if extended.everyone.compare("names of logs", names):
            return {**given, **self.get_metrics_result()}
        if not isinstance(logs, dict):
            return original(self, logs)
        results = self.get_metrics_result()
        merged = (results.keys() & logs.keys()) - own
        means = _averaged({name: value for name, value in logs.items() if name not in merged}, extended)
        return {name: results[name] if name in merged else means[name] for name in logs}

    return _get_metrics_result_or_logs


def _averaged(logs: dict[str, Any], extended: TrainsInRounds) -> dict[str, Any]:
    """Logs of steps that a user wrote, as means over processes as far as they are floating-point numbers."""
    values = tree.flatten(logs)
    tensors = [tf.convert_to_tensor(value) for value in values]
    floating = [place for place, one in enumerate(tensors) if one.dtype.is_floating]
    means = extended.bridge.all_reduce([tf.cast(tensors[place], tf.float64) for place in floating], mean=True)
    for place, mean in zip(floating, means, strict=True):
        values[place] = mean
    return tree.pack_sequence_as(logs, values)


def _of_equal_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes weights equal before `evaluate` and `predict`: `fit` does so, but a custom training loop does not."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.of_model(self, TrainsInRounds)
        if extended is not None and not kwargs.get("_use_cached_eval_dataset"):
            settle(self, extended)
        return original(self, *args, **kwargs)

    return method
