"""Gradients that an optimizer accumulates: each replica its own within an epoch, the writer all of them after it.

So a file that the writer saves then has them as plain Keras's file has, and where it is loaded, the writer has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.notices import warn_once
from tfdist.private import tensorflow as private
from tfdist.private.models import value_of
from tfdist.private.optimizers import accumulated_by, apply_count, variables_of
from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import Ability, DataParallel
from tfdist.strategies.divided_abilities import DividesUpdates
from tfdist.strategies.keras.keras_optimizers import innermost
from tfdist.strategies.keras.keras_variables import optimizers

_GATHERED = "_tfdist_gathered"
"""Attribute of a model: the counts of steps at which the writer had all accumulated gradients."""

_PARTS = (
    "tfdist: a model is saved between two updates of gradient_accumulation_steps: the file has the gradients that this "
    "process has accumulated, and not those of others. Save after an update, or at the end of an epoch of fit, where "
    "the chief has all of them."
)


def install() -> None:
    """Installs the hook."""
    keras_hooks.add(GathersAccumulated)


class GathersAccumulated(keras_hooks.ModelHooks[DataParallel]):
    """The hook that gathers accumulated gradients before the user's callbacks see the end of an epoch."""

    ability = DataParallel

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Adds the callback `GatherAtEpochEnd`, where all processes take each step together."""
        return [GatherAtEpochEnd(self.extended), *given] if self.extended.runs_in_lockstep else given


class GatherAtEpochEnd(keras_hooks.StrategyCallback[DataParallel]):
    """A callback that gives the writer the gradients that all replicas have accumulated."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Gathers the gradients."""
        gather(self.model, self._extended)


def gather(model: Any, extended: DataParallel) -> None:
    """Gives the writer the sums of what all replicas have accumulated, and others zeros; all processes call it.

    It changes no update, as that begins with the sum over replicas.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    variables = list(_accumulators(model, extended))
    if not variables:
        return
    setattr(model, _GATHERED, str(_counts(model)))
    own = [tf.add_n([copy.read_value() for copy in private.copies(value_of(variable))]) for variable in variables]
    _assign(variables, extended.bridge.all_reduce(own), extended)


def warn_of_parts(model: Any, extended: Ability) -> None:
    """Warns the writer of a file whose accumulated gradients are its own only, as of steps since the last update.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    if not isinstance(extended, DataParallel):
        return
    counts = _counts(model)
    is_between = any(count % steps for count, steps in counts) and str(counts) != getattr(model, _GATHERED, None)
    if extended.is_writer and is_between and any(True for _ in _accumulators(model, extended)):
        warn_once(_PARTS)


def _counts(model: Any) -> list[tuple[int, int]]:
    """Returns the number of steps of each optimizer, and the number of steps between its updates."""
    inner = map(innermost, optimizers(model))
    return [(int(apply_count(one)), steps) for one in inner if (steps := one.gradient_accumulation_steps)]


def leave_to_writer(model: Any, extended: DataParallel) -> None:
    """Keeps loaded sums on the writer's first replica alone, of all that have loaded them, so that they count once.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    variables = list(_accumulators(model, extended))
    setattr(model, _GATHERED, str(_counts(model)))
    _assign(variables, [private.copies(value_of(variable))[0].read_value() for variable in variables], extended)


def _accumulators(model: Any, extended: DataParallel) -> Iterator[Any]:
    """Yields the variables in which replicas accumulate gradients of their own, the same on all processes."""
    is_own = extended.synchronizes_steps and not isinstance(extended, DividesUpdates)
    if not is_own or not extended.has_several_replicas:
        return
    for outermost in optimizers(model):
        optimizer = outermost
        while optimizer is not None:
            for variable, sums in zip(variables_of(optimizer), accumulated_by(optimizer), strict=False):
                if not getattr(variable, "overwrite_with_gradient", False):  # of which the largest counts
                    yield sums
            optimizer = getattr(optimizer, "inner_optimizer", None)


def _assign(variables: Sequence[Any], totals: Sequence[tf.Tensor], extended: DataParallel) -> None:
    for variable, total in zip(variables, totals, strict=True):
        for number, copy in enumerate(private.copies(value_of(variable))):
            is_first = extended.is_writer and number == 0
            copy.assign(total if is_first else tf.zeros_like(total), read_value=False)
