"""Patches of Keras ("seams") by which optimizers average gradients; the first such optimizer installs them.

Checked on Keras 3.10 and 3.15. Optimizers without `GradientAverager` of their own behave as in Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.optimizers import local_layers
from tfdist.optimizers.gradients import GradientAverager
from tfdist.optimizers.initial_weight_check import InitialWeightCheck
from tfdist.private import epochs
from tfdist.private.keras import tree
from tfdist.private.models import without_xla
from tfdist.seams import optimizer, trainer
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.strategies import keras_unsynchronized
from tfdist.strategies.keras import keras_building, keras_xla
from tfdist.strategies.keras.keras_optimizers import innermost

_ATTRIBUTE = "_tfdist_gradients"


def gradients_of(optimizer: Any) -> GradientAverager | None:
    """Returns what averages the gradients of an optimizer, or of the one inside it; None if nothing does.

    Args:
        optimizer: a Keras optimizer; for other objects the result is None.
    """
    return getattr(innermost(optimizer), _ATTRIBUTE, None)


def attach(optimizer: Any, gradients: GradientAverager) -> None:
    """Makes an optimizer average its gradients.

    Args:
        optimizer: a Keras optimizer with no other one inside it.
        gradients: averages the gradients. A `keras.optimizers.MultiOptimizer` passes it on to its optimizers, including
            those that it gets later.
    """
    install()
    for target in (optimizer, *getattr(optimizer, "optimizers", ())):
        setattr(target, _ATTRIBUTE, gradients)


@Once
def install() -> None:
    """Installs the seams, once."""
    optimizer.points.provide([Averaged], _optimizer_hooks_of)
    trainer.points.provide([AveragingModelHooks], _model_hooks_of)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        replace(keras.optimizers.MultiOptimizer, "build", _handed_on)
    keras_unsynchronized.accept(lambda model: gradients_of(model.optimizer) is not None)


class Averaged(optimizer.OptimizerHooks):
    """The hooks of an optimizer that averages its gradients.

    Args:
        gradients: averages the gradients of the optimizer.
    """

    def __init__(self, gradients: GradientAverager) -> None:
        self._gradients = gradients

    def begin(self, update: optimizer.Update, gradients: list[Any]) -> list[Any]:
        """Checks that no strategy averages gradients as well.

        Raises:
            RuntimeError: the optimizer is used with a strategy.
        """
        if tf.distribute.has_strategy():
            raise RuntimeError(
                "an optimizer of tfdist.DistributedOptimizer averages gradients itself and works without a strategy: "
                "leave out strategy.scope(), or give the strategy an optimizer that is not wrapped"
            )
        return gradients

    def gradients(self, update: optimizer.Update, gradients: list[Any]) -> list[Any]:
        """Averages gradients over processes."""
        return self._gradients.reduced(gradients, update.variables)

    def overwriting(self, variables: Sequence[Any], values: list[Any]) -> list[Any]:
        """Returns the maximum over processes of new values of variables."""
        return self._gradients.combined(values, np.maximum)

    def finite(self, is_finite: Any) -> Any:
        """Returns whether gradients are finite on all processes, so that all skip the same steps."""
        return tf.equal(self._gradients.combined([tf.cast(is_finite, tf.int32)], np.minimum)[0], 1)


def _optimizer_hooks_of(owner: Any) -> list[Averaged]:
    gradients = gradients_of(owner)
    return [] if gradients is None else [Averaged(gradients)]


def _handed_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """Passes `GradientAverager` on to optimizers that a `keras.optimizers.MultiOptimizer` gets when it is built."""

    def build(self: Any, var_list: Any) -> Any:
        result = original(self, var_list)
        if (gradients := gradients_of(self)) is not None:
            attach(self, gradients)
        return result

    return build


class AveragingModelHooks(trainer.TrainerHooks):
    """Hooks of a model whose optimizer averages gradients.

    Args:
        gradients: averages the gradients of the optimizer.
    """

    def __init__(self, gradients: GradientAverager) -> None:
        self._gradients = gradients

    def fit(self, call: trainer.TrainerCall) -> None:
        """Warns of layers whose statistics stay local, and adds the check that weights begin equal."""
        local_layers.warn(call.model, self._gradients.group.size)
        given = call.arguments["callbacks"]
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(InitialWeightCheck(self._gradients))
        else:
            call.arguments["callbacks"] = [*tree.flatten(given or []), InitialWeightCheck(self._gradients)]

    def error(self, error: Exception) -> Exception | None:
        """Returns the original of an error of tfdist that a graph has wrapped in one of TensorFlow."""
        cause = self._gradients.group.engine.cause_of(error.message) if isinstance(error, tf.errors.OpError) else None
        return cause and cause.with_traceback(None)

    def symbolic_build(self, call: trainer.TrainerCall) -> None:
        """Builds what Keras would make in a first trace of a step, and disables `tf.data`'s autotuner.

        All processes would wait for the autotuner at the end of each epoch.
        """
        iterator = call.arguments["iterator"]
        if iterator is not None:
            epochs.untune(iterator)
        keras_building.build_without_strategy(call.model, iterator, call.arguments["data_batch"])

    def make_function(self, call: trainer.TrainerCall) -> contextlib.AbstractContextManager[None] | None:
        """Makes XLA compile the part of Keras's own step before the averaging, but not steps of users.

        Keras chooses XLA by itself if there is a GPU, and does not tell whether the user did. XLA compiles no host
        calls.
        """
        step, model = call.arguments["step_function"], call.model
        if step != model.train_step or not model.jit_compile:
            return None
        if keras_xla.is_of_keras(model, "train_step"):
            call.arguments["step_function"] = keras_xla.compiled(model, step)
        return without_xla(model)


def _model_hooks_of(model: Any) -> list[AveragingModelHooks]:
    gradients = gradients_of(getattr(model, "optimizer", None))
    return [] if gradients is None else [AveragingModelHooks(gradients)]
