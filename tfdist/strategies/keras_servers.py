"""Keras on parameter servers: updates are made there, and what reads the model reads its newest parameters."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies import at_work
from tfdist.strategies.abilities import UpdatesOnServers
from tfdist.strategies.keras_private import base_optimizer, tf_trainer
from tfdist.strategies.shares import batch_size


class _Samples(threading.local):
    """The number of samples of the step that this thread traces, or runs eagerly; the innermost last."""

    def __init__(self) -> None:
        self.of_steps: list[Any] = []


_samples = _Samples()


def install(replace: Callable[..., None]) -> None:
    """Installs the seams.

    Args:
        replace: replaces one function by another.
    """
    replace(base_optimizer.BaseOptimizer, "apply", _on_servers)
    replace(base_optimizer.BaseOptimizer, "finalize_variable_values", _of_averages)
    trainer = tf_trainer.TensorFlowTrainer
    replace(trainer, "_make_function", _counting_samples)
    for name in ("evaluate", "predict"):
        replace(trainer, name, _of_newest_values)
    for name in ("save", "save_weights", "export"):
        replace(keras.Model, name, _of_newest_state)


def _on_servers(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        extended = _extended_of(self) or at_work.current(UpdatesOnServers)
        if extended is None or not len(grads):
            return original(self, grads, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        samples = _samples.of_steps[-1] if _samples.of_steps else 1
        apply = functools.partial(original, self, grads, trainable_variables)
        extended.update_on_servers(self, list(grads), variables, samples, apply)

    return apply


def _extended_of(optimizer: Any) -> UpdatesOnServers | None:
    """The `extended` of the strategy that an optimizer was made under, if its updates are made on servers."""
    return at_work.of_strategy(_strategy_of(optimizer), UpdatesOnServers)


def _strategy_of(optimizer: Any) -> Any:
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), "_distribution_strategy", None)


def _counting_samples(original: Callable[..., Any]) -> Callable[..., Any]:
    """Steps know their number of samples, by which gradients are averaged.

    The number also orders an update behind its batch: Keras runs what does not depend on a batch once more where the
    data end.
    """

    def _make_function(self: Any, step_function: Callable[..., Any]) -> Callable[..., Any]:
        if at_work.of_model(self, UpdatesOnServers) is None:
            return original(self, step_function)
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and at_work.of_strategy(_strategy_of(optimizer), UpdatesOnServers) is None:
            raise ValueError(
                f"created outside of strategy.scope(): the optimizer {optimizer.name}. Create the model, and the "
                "optimizer passed to `compile`, inside `with strategy.scope():`."
            )
        self.jit_compile = False

        def step(data: Any) -> Any:
            with _counted(batch_size(data)):
                return step_function(data)

        return original(self, step)

    return _make_function


@contextlib.contextmanager
def _counted(samples: tf.Tensor) -> Iterator[None]:
    _samples.of_steps.append(samples)
    try:
        yield
    finally:
        _samples.of_steps.pop()


def _of_averages(original: Callable[..., Any]) -> Callable[..., Any]:
    def finalize_variable_values(self: Any, var_list: Any) -> None:
        extended = _extended_of(self)
        link = extended.link_of(self) if extended is not None and self.use_ema else None
        if link is None or link.averages_here:
            return original(self, var_list)
        return link.finalize()

    return finalize_variable_values


def _of_newest_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """`evaluate` and `predict` read one version, the newest when they begin; no worker waits for them."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.of_model(self, UpdatesOnServers)
        with contextlib.ExitStack() as stack:
            for link in extended.links(self) if extended is not None else []:
                stack.enter_context(link.newest())
            return original(self, *args, **kwargs)

    return method


def _of_newest_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Saved models hold the newest values, and the optimizer's variables as the servers have them."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.of_model(self, UpdatesOnServers)
        with contextlib.ExitStack() as stack:
            for link in extended.links(self) if extended is not None else []:
                stack.enter_context(link.newest_state())
            return original(self, *args, **kwargs)

    return method


class Pauses(keras.callbacks.Callback):
    """Lets other workers go on while this one is between epochs, and gives it the newest values before the next one.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: UpdatesOnServers) -> None:
        super().__init__()
        self._extended = extended

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads the newest values."""
        for link in self._extended.links(self.model):
            link.refresh()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Nobody waits for this worker's callbacks."""
        for link in self._extended.links(self.model):
            link.suspend()

    def on_train_end(self, logs: Any = None) -> None:
        """Nobody waits for this worker before it trains again."""
        for link in self._extended.links(self.model):
            link.suspend(is_end=True)
