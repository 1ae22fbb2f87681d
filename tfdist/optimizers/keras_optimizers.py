"""The seams of Keras by which an optimizer averages its gradients; installed with the first such optimizer.

Checked on Keras 3.10 and 3.15. Optimizers without `Gradients` of their own do what they do in Keras.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.optimizers import local_layers
from tfdist.optimizers.equal_beginning import EqualBeginning
from tfdist.optimizers.gradients import Gradients
from tfdist.private.keras import base_optimizer, tf_trainer, tree
from tfdist.seams.registry import replace
from tfdist.strategies import keras_noise, keras_unsynchronized
from tfdist.strategies.keras_optimizers import innermost

_ATTRIBUTE = "_tfdist_gradients"
_installed = False


def gradients_of(optimizer: Any) -> Gradients | None:
    """What averages the gradients of an optimizer, or of the one within it.

    Args:
        optimizer: of Keras; anything else averages nothing.
    """
    return getattr(innermost(optimizer), _ATTRIBUTE, None)


def attach(optimizer: Any, gradients: Gradients) -> None:
    """Lets an optimizer average its gradients.

    Args:
        optimizer: of Keras, with no other one within it.
        gradients: how. A `keras.optimizers.MultiOptimizer` hands it on to its optimizers, also those that it is yet to
            be given.
    """
    install()
    for one in (optimizer, *getattr(optimizer, "optimizers", ())):
        setattr(one, _ATTRIBUTE, gradients)


def install() -> None:
    """Installs the seams, once."""
    global _installed
    if _installed:
        return
    _installed = True
    keras_noise.install()
    replace(base_optimizer.BaseOptimizer, "_backend_apply_gradients", _knowing_the_variables)
    replace(base_optimizer.BaseOptimizer, "_clip_gradients", _averaged_first)
    replace(base_optimizer.BaseOptimizer, "_overwrite_variables_directly_with_gradients", _largest_everywhere)
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _finite_everywhere)
    replace(tf_trainer.TensorFlowTrainer, "make_train_function", _without_xla)
    replace(tf_trainer.TensorFlowTrainer, "fit", _beginning_alike)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        replace(keras.optimizers.MultiOptimizer, "build", _handed_on)
    keras_unsynchronized.accept(lambda model: gradients_of(model.optimizer) is not None)


def _knowing_the_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        gradients = gradients_of(self)
        if gradients is not None:
            if tf.distribute.has_strategy():
                raise RuntimeError(
                    "an optimizer of tfdist.DistributedOptimizer averages gradients itself and works without a "
                    "strategy: leave out strategy.scope(), or give the strategy an optimizer that is not wrapped"
                )
            gradients.variables = list(trainable_variables)
        return original(self, grads, trainable_variables)

    return _backend_apply_gradients


def _handed_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `keras.optimizers.MultiOptimizer` may be given its optimizers for one variable after another."""

    def build(self: Any, var_list: Any) -> Any:
        result = original(self, var_list)
        if (gradients := gradients_of(self)) is not None:
            attach(self, gradients)
        return result

    return build


def _averaged_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def _clip_gradients(self: Any, grads: Any) -> Any:
        gradients = gradients_of(self)
        return original(self, grads if gradients is None else gradients.reduced(grads, gradients.variables))

    return _clip_gradients


def _largest_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Variables whose "gradient" is their new value (float8 ranges) get the maximum over processes."""

    def _overwrite_variables_directly_with_gradients(self: Any, grads: Any, variables: Any) -> Any:
        gradients = gradients_of(self)
        chosen = [place for place, variable in enumerate(variables) if self._overwrite_variable_with_gradient(variable)]
        if gradients is not None and chosen:
            grads = list(grads)
            found = gradients.combined([grads[place] for place in chosen], np.maximum)
            for place, value in zip(chosen, found, strict=True):
                grads[place] = value
        return original(self, grads, variables)

    return _overwrite_variables_directly_with_gradients


def _finite_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """One process's infinity makes all processes skip the step: they must average in the same steps."""

    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        gradients = gradients_of(self)
        if gradients is None:
            return finite
        return tf.equal(gradients.combined([tf.cast(finite, tf.int32)], np.minimum)[0], 1)

    return check_finite


def _beginning_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = gradients_of(self.optimizer)
        if gradients is None:
            return original(self, *args, **kwargs)
        local_layers.warn(self, gradients.group.size)
        call = signature.bind(self, *args, **kwargs)
        given = call.arguments.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(EqualBeginning(gradients))
        else:
            call.arguments["callbacks"] = [*tree.flatten(given or []), EqualBeginning(gradients)]
        return original(*call.args, **call.kwargs)

    return fit


def _without_xla(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras chooses XLA where there is a GPU, and XLA compiles no calls of the host."""

    def make_train_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gradients_of(self.optimizer) is not None:
            self.jit_compile = False
        return original(self, *args, **kwargs)

    return make_train_function
