"""XLA in steps that call the host: a replica's computations between collectives are compiled.

Plain Keras compiles a whole step. XLA cannot compile calls of the host, by which processes communicate. So one of
Keras's own steps is compiled up to the point where it gives gradients to its optimizer: forward pass, loss and backward
pass are one computation. The optimizer, in which gradients are summed, and the metrics of `compile` follow outside. In
a user's custom step, the model's forward pass is compiled, and its backward pass with it.

Compiled code assigns to no variables: they get their values after it, where state is merged over replicas. A forward
pass that communicates, as with synchronized BatchNormalization, is not compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import keras
import tensorflow as tf

from tfdist.engine import host_calls
from tfdist.notices import warn_once
from tfdist.private import models
from tfdist.private.tensorflow import copies
from tfdist.seams.trainer import TrainerCall, WithPredictStep
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.abilities import Ability
from tfdist.strategies.divided_abilities import HasStages
from tfdist.strategies.keras import compiled_functions

_STEPS = ("train_step", "test_step", "predict_step")


def install() -> None:
    """Installs the hooks, which have to be further out than those that make steps work on shares."""
    keras_hooks.add(Compiled)


class Compiled(keras_hooks.ModelHooks[Ability]):
    """Hooks that compile as much as possible of steps that call the host."""

    def compile(self, call: TrainerCall) -> None:
        """Decides whether XLA is used: ``"auto"`` means the same as in plain Keras, except for custom steps.

        ``"auto"`` does not compile custom steps that call the host: they may read tensors that a layer keeps from its
        forward pass, which are not available outside of the compiled code.
        """
        given, model = call.arguments, call.model
        if isinstance(self.extended, HasStages):
            if given["jit_compile"] is True:
                _say(self.extended, "stages of a pipeline communicate within a step")
            given["jit_compile"] = False
        elif given["jit_compile"] == "auto" and not given["run_eagerly"]:
            whole = not self.extended.calls_host_in_steps
            given["jit_compile"] = (whole or _has_steps_of_keras(model)) and models.xla_by_default(model)

    def make_function(self, call: TrainerCall) -> contextlib.AbstractContextManager[None] | None:
        """Compiles the computations of `train_step` or `test_step`."""
        if not self._is_used(call.model):
            return None
        call.arguments["step_function"] = compiled(call.model, call.arguments["step_function"], self.extended)
        return models.without_xla(call.model)

    def make_predict_function(self, call: TrainerCall) -> contextlib.AbstractContextManager[None] | None:
        """Compiles the computations of `predict_step`."""
        if not self._is_used(call.model):
            return None
        step = compiled(call.model, call.model.predict_step, self.extended)
        call.arguments["self"] = WithPredictStep(call.model, step)
        return models.without_xla(call.model)

    def _is_used(self, model: Any) -> bool:
        return self.extended.calls_host_in_steps and model.jit_compile


def compiled(model: Any, step_function: Callable[..., Any], extended: Ability | None = None) -> Callable[..., Any]:
    """Returns a step that XLA compiles as far as possible.

    Args:
        model: a Keras model.
        step_function: the model's `train_step`, `test_step` or `predict_step`.
        extended: the `extended` of the model's strategy; None without one.
    """
    is_own = any(step_function == getattr(model, name) and is_of_keras(model, name) for name in _STEPS)
    compute = _as_a_whole if is_own else _with_compiled_calls

    @functools.wraps(step_function)
    def step(data: Any) -> Any:
        obstacle = _obstacle(model, data, extended)
        if obstacle is not None:
            _say(extended, obstacle)
            return step_function(data)
        sharing = current_strategy.sharing()
        with contextlib.nullcontext() if sharing is None else sharing.shares.read_before():
            return compute(model, step_function, data, functools.partial(_say, extended))

    return step


def _has_steps_of_keras(model: Any) -> bool:
    return all(is_of_keras(model, name) for name in (*_STEPS, "compute_metrics"))


def is_of_keras(model: Any, name: str) -> bool:
    """Returns whether a method of a model is Keras's own.

    Args:
        model: a Keras model.
        name: name of the method.
    """
    owner = next(kind for kind in type(model).__mro__ if name in vars(kind))
    return name not in vars(model) and owner.__module__.partition(".")[0] == "keras"


def _obstacle(model: Any, data: Any, extended: Ability | None) -> str | None:
    """Returns the reason why a step cannot be compiled at all, as text; None if no reason is known."""
    if not model.built:
        return "the model is not built before its first step"
    if not all(compiled_functions.can_take(leaf) for leaf in tf.nest.flatten(data)):
        return "XLA takes no ragged or sparse tensors, and no strings"
    if extended is not None and not all(extended.holds(model, variable) for variable in model.variables):
        return "layers exchange weights or activations with other processes when they are called"
    if extended is not None and _are_elsewhere(model.variables, extended.worker_devices):
        return "the weights are on other devices than the replicas"
    return None


def _are_elsewhere(variables: list[Any], devices: Sequence[str]) -> bool:
    held = [copy for variable in variables for copy in copies(models.value_of(variable))]
    return not {_name_of(component.device) for component in held} <= set(map(_name_of, devices))


def _name_of(device: str) -> str:
    return device.rpartition("device:")[2]


def _say(extended: Ability | None, reason: str) -> None:
    if extended is None or extended.is_writer:
        warn_once("tfdist: XLA does not compile a step of the model: %s.", reason)


def _as_a_whole(model: Any, step_function: Callable[..., Any], data: Any, say: Callable[[str], None]) -> Any:
    """Takes one of Keras's own steps, compiled. The optimizer and the metrics, which it calls last, follow outside."""

    def until_used(batch: Any) -> Any:
        with _Postponed(model) as postponed:
            return step_function(batch), postponed.update, postponed.measure

    try:
        (outputs, update, measure), _ = compiled_functions.call(until_used, data)
    except host_calls.HostCallError as error:
        say(str(error))
        return step_function(data)
    if update is not None:
        model.optimizer.apply_gradients(update)
    return outputs if measure is None else model.compute_metrics(*measure[0], **measure[1])


class _Postponed:
    """A context in which a step does not update weights, nor the metrics of `compile`, but records the arguments.

    Args:
        model: a Keras model.

    Attributes:
        update: the pairs of gradient and variable that `apply_gradients` was given; None if it was not called.
        measure: the positional and named arguments of `compute_metrics`; None if it was not called.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.update: list[Any] | None = None
        self.measure: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __enter__(self) -> Self:
        vars(self._model)["compute_metrics"] = self._measured
        if self._model.optimizer is not None:
            vars(self._model.optimizer)["apply_gradients"] = self._updated
        return self

    def __exit__(self, *error: object) -> None:
        del vars(self._model)["compute_metrics"]
        if self._model.optimizer is not None:
            del vars(self._model.optimizer)["apply_gradients"]

    def _updated(self, pairs: Any) -> None:
        self.update = list(pairs)

    def _measured(self, *arguments: Any, **named: Any) -> None:
        self.measure = arguments, named


def _with_compiled_calls(model: Any, step_function: Callable[..., Any], data: Any, say: Callable[[str], None]) -> Any:
    """Takes a custom step, in which each call of the model is one compiled computation, and its gradient another."""
    original = type(model).call.__get__(model)

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        def called(given: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
            return original(*given, **by_name)

        try:
            outputs, losses = compiled_functions.call(called, arguments, named)
        except host_calls.HostCallError as error:
            say(str(error))
            return original(*arguments, **named)
        for loss in losses:
            keras.layers.Layer.add_loss(model, loss)  # a functional model's own method refuses
        return outputs

    vars(model)["call"] = call  # another device's replica may still use its own, which does the same
    try:
        return step_function(data)
    finally:
        vars(model).pop("call", None)
