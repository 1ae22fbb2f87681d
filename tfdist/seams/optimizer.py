"""The hook points of an optimizer: changes of gradients between the call of `apply` and the update."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.keras import base_optimizer
from tfdist.seams.hooks import Context, HookPoints, Hooks, MethodCall
from tfdist.seams.registry import Function
from tfdist.thread_values import ThreadValue


class Update:
    """An update that an optimizer makes in the calling thread, in the graph under construction or eagerly.

    Args:
        optimizer: Keras optimizer that applies the gradients itself.
        variables: variables that the optimizer has gradients of, in their order.

    Attributes:
        optimizer: Keras optimizer that applies the gradients itself.
        variables: variables that the optimizer has gradients of, in their order.
        weight: factor of the gradients that is still to be applied when they are summed, a scalar tensor; None if they
            are weighted already.
        is_summed: whether gradients have been summed over replicas.
        has_begun_to_clip: whether the hooks before clipping have run.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.optimizer = optimizer
        self.variables = tuple(variables)
        self.weight: Any = None
        self.is_summed = False
        self.has_begun_to_clip = False


class OptimizerCall(MethodCall):
    """A call of a method of an optimizer."""

    @property
    def optimizer(self) -> Any:
        """The optimizer whose method is called."""
        return self.owner

    @property
    def is_outermost(self) -> bool:
        """Whether the call was not made by an optimizer that contains this one."""
        return _applied_optimizers.value == 1

    @property
    def applies_itself(self) -> bool:
        """Whether this optimizer applies gradients itself, instead of passing them to inner optimizers."""
        return not isinstance(self.owner, _CONTAINERS)


class OptimizerHooks(Hooks):
    """The hooks of a feature for one optimizer; a method that is not overridden does nothing."""

    def apply(self, call: OptimizerCall) -> Context:
        """Runs at `keras.optimizers.Optimizer.apply`, also of optimizers that contain others."""

    def begin(self, update: Update, gradients: list[Any]) -> list[Any]:
        """Runs when an update begins, with gradients that are unscaled and not accumulated yet.

        Args:
            update: the update that begins.
            gradients: gradients of the update's variables.

        Returns:
            The gradients that are used in their place.
        """
        return gradients

    def gradients(self, update: Update, gradients: list[Any]) -> list[Any]:
        """Runs when gradients, which have been accumulated, are about to be clipped.

        Args:
            update: the update under way.
            gradients: gradients of the update's variables.

        Returns:
            The gradients that are used in their place.
        """
        return gradients

    def overwriting(self, variables: Sequence[Any], values: list[Any]) -> list[Any]:
        """Runs when variables are about to be overwritten, whose "gradients" are their new values (float8 ranges).

        Args:
            variables: Keras variables.
            values: new values of the variables.

        Returns:
            The values that are used in their place.
        """
        return values

    def finite(self, is_finite: Any) -> Any:
        """Runs after gradients have been checked for infinity and NaN.

        Args:
            is_finite: whether all gradients are finite, a scalar tensor.

        Returns:
            Whether the step is made.
        """
        return is_finite


_CONTAINERS = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)
)
"""Optimizers that contain others, each with an `apply` of its own."""


_applied_optimizers = ThreadValue(0)
"""Number of optimizers, one within another, that a thread applies."""
_own_clipping: weakref.WeakSet[type[Any]] = weakref.WeakSet()
"""Classes of users that override the clipping, which has the hooks now."""
_update: ThreadValue[Update | None] = ThreadValue(None)
"""The update that one of a thread's optimizers makes; None if none does."""


def update_of(optimizer: Any) -> Update | None:
    """Returns the update that an optimizer makes in this thread; None if it makes none.

    Args:
        optimizer: a Keras optimizer.
    """
    update = _update.value
    return update if update is not None and update.optimizer is optimizer else None


def within_update(branch: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that belongs to the update under way, in whichever thread it is called.

    Args:
        branch: function to call within the update, for example the branch of a conditional.
    """
    update = _update.value

    def within() -> Any:
        with _update.set_to(update):
            return branch()

    return within


def _applied(original: Function) -> Function:
    asking = points.around(original, "apply")

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        with _applied_optimizers.set_to(_applied_optimizers.value + 1):
            return asking(self, grads, trainable_variables)

    return apply


def _begun(original: Function) -> Function:
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        _before_own_clipping(type(self))
        update = Update(self, trainable_variables)
        for hook in points.hooks_of(self, "begin"):
            grads = hook.begin(update, list(grads))
        with _update.set_to(update):
            return original(self, grads, trainable_variables)

    return _backend_apply_gradients


def _reduced(original: Function) -> Function:
    def _clip_gradients(self: Any, grads: Any) -> Any:
        update = update_of(self)
        if update is not None and not update.has_begun_to_clip:
            update.has_begun_to_clip = True
            for hook in points.hooks_of(self, "gradients"):
                grads = hook.gradients(update, list(grads))
        return original(self, grads)

    return _clip_gradients


def _before_own_clipping(kind: type[Any]) -> None:
    """Has the hooks before clipping run where a subclass of Keras's optimizers overrides it, before its own code."""
    owner: Any = next(base for base in kind.__mro__ if "_clip_gradients" in vars(base))
    if owner is not base_optimizer.BaseOptimizer and owner not in _own_clipping:
        _own_clipping.add(owner)
        owner._clip_gradients = functools.wraps(owner._clip_gradients)(_reduced(owner._clip_gradients))


def _overwritten(original: Function) -> Function:
    def _overwrite_variables_directly_with_gradients(self: Any, grads: Any, variables: Any) -> Any:
        places = [place for place, variable in enumerate(variables) if self._overwrite_variable_with_gradient(variable)]
        if not places:
            return original(self, grads, variables)
        values, chosen = [grads[place] for place in places], [variables[place] for place in places]
        for hook in points.hooks_of(self, "overwriting"):
            values = hook.overwriting(chosen, values)
        grads = list(grads)
        for place, value in zip(places, values, strict=True):
            grads[place] = value
        return original(self, grads, variables)

    return _overwrite_variables_directly_with_gradients


def _found_finite(original: Function) -> Function:
    def check_finite(self: Any, grads: Any) -> Any:
        # Checks only the values of sparse gradients: Keras would make them dense, impossible for rows with any key.
        finite = original(
            self, [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in grads]
        )
        for hook in reversed(points.hooks_of(self, "finite")):
            finite = hook.finite(finite)
        return finite

    return check_finite


points = HookPoints(
    OptimizerHooks,
    {
        "apply": [(kind, "apply") for kind in (base_optimizer.BaseOptimizer, *_CONTAINERS)],
        "begin": [(base_optimizer.BaseOptimizer, "_backend_apply_gradients")],
        "gradients": [
            (base_optimizer.BaseOptimizer, "_backend_apply_gradients"),
            (base_optimizer.BaseOptimizer, "_clip_gradients"),
        ],
        "overwriting": [(base_optimizer.BaseOptimizer, "_overwrite_variables_directly_with_gradients")],
        "finite": [(keras.optimizers.LossScaleOptimizer, "check_finite")],
    },
    call=OptimizerCall,
    wrappers={
        "apply": _applied,
        "_backend_apply_gradients": _begun,
        "_clip_gradients": _reduced,
        "_overwrite_variables_directly_with_gradients": _overwritten,
        "check_finite": _found_finite,
    },
)
