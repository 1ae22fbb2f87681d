"""Patches of Keras ("seams") for models in stages: their steps, their weights, and their files.

| seam | why |
|---|---|
| functions that run steps | steps run in the pipeline |
| `compile`, ``fit``, `load_model` and others | variables are placed before anything reads them |
| ``fit`` | micro-batches must divide its batches; errors explain how data may differ |
| `get_weights`, `set_weights` | weights are on several processes |
| `EarlyStopping` | each process keeps the best weights of its own stages, not those of all |
| `check_finite` | gradients are finite if those of all stages are |
| `global_norm`, moving averages, `SwapEMAWeights` | `tfdist.strategies.divided.divided_updates` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import MismatchError
from tfdist.model_parallel.model_calls import graph_of
from tfdist.pipeline import model_steps
from tfdist.pipeline.processes import OTHER_DATA
from tfdist.private.keras import base_trainer, layer, saving_lib, tf_trainer, tree
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall, WithPredictStep
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.divided import described_variables, divided_updates, split_axis, weight_callbacks, weight_parts
from tfdist.strategies.divided_abilities import HasStages
from tfdist.thread_values import ThreadValue

_SAME_BATCHES = (
    "Under PipelineStrategy every process reads all batches, and takes part where the weights of all stages are read: "
    "give all processes the same number of batches in each epoch and each validation, and have all of them make the "
    "same calls, of `get_weights` and `save` as well."
)


_own_weights_only = ThreadValue(False)
"""Whether a thread reads and assigns only the weights that its process holds."""


class _RemoteWeight:
    """Replaces a weight that another process holds in the result of `get_weights`.

    Args:
        shape: shape of the weight.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)


@Once
def install() -> None:
    """Installs the seams, once."""
    described_variables.install()
    model_steps.install()
    divided_updates.install()
    keras_hooks.add_for_optimizers(OnAllStages)
    keras_hooks.add(InStages)
    replace(saving_lib, "_load_state", _place_before_loading)
    replace(layer.Layer, "get_weights", _gather_weights)
    replace(layer.Layer, "set_weights", _assign_held_weights)
    for name in ("on_train_begin", "on_epoch_end", "on_train_end"):
        replace(keras.callbacks.EarlyStopping, name, _with_own_weights)


class InStages(keras_hooks.ModelHooks[HasStages]):
    """Hooks that place models before they are used, and run their steps in the pipeline."""

    ability = HasStages

    @contextlib.contextmanager
    def compile(self, call: TrainerCall) -> Iterator[None]:
        """Places the model after compilation, if it is built."""
        yield
        _place_if_built(call.model, self.extended)

    def fit(self, call: TrainerCall) -> None:
        """Checks that micro-batches divide the batches, and places the model."""
        self.extended.check_batches(call.arguments["x"], call.arguments["batch_size"])
        _place_if_built(call.model, self.extended)

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Replaces callbacks that read weights, so that the writer gets those of all processes."""
        return weight_callbacks.adapted(given, self.extended)

    def evaluate(self, call: TrainerCall) -> None:
        """Places the model."""
        _place_if_built(call.model, self.extended)

    predict = train_on_batch = test_on_batch = evaluate

    def predict_on_batch(self, call: TrainerCall) -> None:
        """Runs the prediction in stages."""
        call.replace(lambda: _predicted(call.model, _steps(call.model, self.extended), call.arguments["x"]))

    def export(self, call: TrainerCall) -> None:
        """Refuses to export a model that no process has as a whole.

        Raises:
            ValueError: a layer is split, or stages are on several processes.
        """
        split = [variable for variable in call.model.variables if split_axis.asked_for(variable) is not None]
        if split:
            raise weight_parts.not_exported(split[0])
        if self.extended.over_updaters.size > 1:
            raise ValueError(
                "export: each process has only its own stages of the model. Save the model, load it outside of the "
                "scope, and export that."
            )

    def make_function(self, call: TrainerCall) -> None:
        """Runs training and test steps in stages."""
        steps = _steps(call.model, self.extended)
        trains = call.arguments["step_function"].__name__ == "train_step"
        if trains:
            steps.check_training()
        call.arguments["step_function"] = steps.train if trains else steps.test
        call.replace(lambda: _counted(call.inner(), self.extended) if trains else call.inner())

    def make_predict_function(self, call: TrainerCall) -> None:
        """Runs prediction steps in stages."""
        call.arguments["self"] = WithPredictStep(call.model, _steps(call.model, self.extended).predict)
        call.replace(call.inner)

    def error(self, error: Exception) -> Exception | None:
        """Explains that processes read different data, if a step or a collective found that; returns None otherwise."""
        text = str(error)
        if isinstance(error, tf.errors.InvalidArgumentError) and OTHER_DATA in text:
            return MismatchError(f"rank {self.extended.all_processes.rank}: {_assertion_message(text)}")
        if isinstance(error, MismatchError) and "different collectives" in text and _SAME_BATCHES not in text:
            return MismatchError(f"{error} {_SAME_BATCHES}")
        return None


class OnAllStages(keras_hooks.StrategyOptimizerHooks[HasStages]):
    """Hooks that treat gradients as finite only if they are finite on all stages."""

    ability = HasStages

    def finite(self, is_finite: Any) -> Any:
        """Returns whether gradients are finite on all stages."""
        infinite = tf.cast(tf.logical_not(is_finite), tf.int32)
        stages = self.extended.over_updaters
        reduced = stages.all_reduce([infinite], combine=np.maximum, names=["whether gradients are finite"])
        return tf.equal(reduced[0], 0)


# Steps.


def _counted(function: Callable[[Any], Any], extended: HasStages) -> Callable[[Any], Any]:
    def counted(iterator: Any) -> Any:
        with extended.stopping.step(trains=True):
            return function(iterator)

    return counted


def _predicted(model: Any, steps: Any, x: Any) -> Any:
    predict = steps.predict if model.run_eagerly else steps.predict_in_graph
    outputs = predict((tree.map_structure(tf.convert_to_tensor, x),))
    return tree.map_structure(tf_trainer.convert_to_np_if_not_ragged, outputs)


def _steps(model: Any, extended: HasStages) -> Any:
    """Returns the steps of a model, whose class must not override Keras's own steps.

    Raises:
        ValueError: the model's class overrides a step or ``compute_metrics``.
    """
    trainer = tf_trainer.TensorFlowTrainer
    for name, base in (
        ("train_step", trainer), ("test_step", trainer), ("predict_step", trainer),
        ("compute_metrics", base_trainer.Trainer),
    ):  # fmt: skip
        if getattr(type(model), name) is not getattr(base, name):
            raise ValueError(
                f"{type(model).__name__} has its own {name}, which would need the whole model in one process. "
                "PipelineStrategy makes the steps itself: use the loss and metrics of compile, or override "
                "compute_loss."
            )
    return extended.steps_of(model)


# Placement.


def _assertion_message(text: str) -> str:
    """Returns the message of an assertion in a graph, without its place in the graph."""
    said = text[text.index(OTHER_DATA) :].split("\n\t [[")[0]
    return said.replace("] [", " ").strip().removesuffix("]")  # without the brackets around asserted tensors


def _place_if_built(model: Any, extended: HasStages) -> None:
    """Places a model, except a Sequential one without an Input, which the first batch builds."""
    if isinstance(model, keras.Sequential) and not model.built:
        return
    graph_of(model)
    extended.place(model)


def _place_before_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Places variables before a file is read into them; by `load_model`, each process reads the file into its own."""

    def _load_state(saveable: Any, *args: Any, **kwargs: Any) -> Any:
        extended = current_strategy.of_model(saveable, HasStages) if isinstance(saveable, keras.Model) else None
        inner_path = kwargs.get("inner_path", args[2] if len(args) > 2 else "")
        if extended is None or inner_path:
            return original(saveable, *args, **kwargs)
        _place_if_built(saveable, extended)
        if described_variables.can_assign():
            return original(saveable, *args, **kwargs)
        with described_variables.assigning(extended.assign_part):
            return original(saveable, *args, **kwargs)

    return _load_state


# Weights.


def _gather_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_weights(self: Any) -> Any:
        extended = current_strategy.of_model(self, HasStages) if isinstance(self, keras.Model) else None
        if extended is None:
            return original(self)
        _place_if_built(self, extended)
        if _own_weights_only.value:
            with weight_parts.only_parts(self.weights):
                return [
                    _RemoteWeight(weight.shape) if described_variables.is_elsewhere(weight) else weight.numpy()
                    for weight in self.weights
                ]
        return extended.values(self, self.weights)

    return get_weights


def _assign_held_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_weights(self: Any, weights: Any) -> None:
        extended = current_strategy.of_model(self, HasStages) if isinstance(self, keras.Model) else None
        if extended is None:
            return original(self, weights)
        _place_if_built(self, extended)
        if _own_weights_only.value or any(isinstance(weight, _RemoteWeight) for weight in weights):
            with weight_parts.only_parts(self.weights):
                for variable, value in zip(self.weights, weights, strict=True):
                    if not isinstance(value, _RemoteWeight):
                        variable.assign(value)
            return None
        with described_variables.assigning(extended.assign_part):
            return original(self, weights)

    return set_weights


def _with_own_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_strategy.of_model(self.model, HasStages) is None:
            return original(self, *args, **kwargs)
        with _own_weights_only.set_to(True):
            return original(self, *args, **kwargs)

    return hook
