"""Variables of a model outside of steps: which there are, and how processes come to have equal values."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.private import tensorflow as private
from tfdist.private.models import layers_of, state_of, value_of
from tfdist.private.optimizers import strategy_of as strategy_of_optimizer
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.abilities import Ability, DataParallel
from tfdist.strategies.divided_abilities import DividesUpdates
from tfdist.tensors import unnumbered


def install() -> None:
    """Installs the hook that makes state equal before `evaluate`."""
    keras_hooks.add(EqualState)


def check_scope(model: Any) -> None:
    """Checks that all state was made in the strategy's scope: other state would silently differ between processes.

    Args:
        model: a Keras model, built under a strategy whose replicas have copies of its variables.

    Raises:
        ValueError: a variable or the optimizer was made outside the scope.
    """
    extended = current_strategy.of_model(model, Ability)
    outside = [
        variable.path
        for variable in (*model.variables, *model.metrics_variables)
        if (extended is None or extended.holds(model, variable)) and not private.is_distributed_variable(variable.value)
    ]
    optimizer = getattr(model, "optimizer", None)
    strategy = strategy_of_optimizer(optimizer, model.distribute_strategy)
    if optimizer is not None and strategy is not model.distribute_strategy:
        outside.append(f"the optimizer {optimizer.name}")
    if outside:
        raise ValueError(
            f"created outside of strategy.scope(): {', '.join(outside[:5])}{', …' if len(outside) > 5 else ''}. Create "
            "the model, and the optimizer and metrics passed to `compile`, inside `with strategy.scope():`, and call "
            "`adapt`, `build`, `enable_lora` and `quantize` there; otherwise their values would differ between "
            "processes."
        )


def state_of_layers(model: Any) -> list[Any]:
    """Returns the variables of a model's layers that were created non-trainable, and that this process holds.

    Frozen weights are not among them, nor metrics.
    """
    extended = current_strategy.of_model(model, Ability)
    return [
        variable
        for layer in layers_of(model)
        for variable in state_of(layer)
        if variable.synchronization != "on_read" and (extended is None or extended.holds(model, variable))
    ]


def broadcast_state(model: Any, extended: DataParallel) -> None:
    """Gives every process the chief's weights and the state of its optimizers."""
    if isinstance(extended, DividesUpdates):
        extended.equalize(model)
    else:
        broadcast(model, extended)


def broadcast(model: Any, extended: DataParallel, without: Container[int] = ()) -> None:
    """Gives every process the chief's values of a model's weights and of its optimizers' variables.

    Args:
        model: a Keras model.
        extended: the strategy's `extended`.
        without: variables that are left out, by their `id`.
    """
    variables = list(model.variables)
    for optimizer in optimizers(model):
        variables += optimizer.variables
    seen: set[int] = set()
    for variable in variables:
        if id(variable) in seen or id(variable) in without or getattr(variable, "synchronization", None) == "on_read":
            continue
        value = tf.convert_to_tensor(variable.value)
        key = f"the state of {unnumbered(variable.path)} #{len(seen)} {value.dtype.name} {value.shape}"
        seen.add(id(variable))
        variable.assign(extended.exchange.broadcast_once(value, key, f"{value.dtype.name} {value.shape}"))


def optimizers(model: Any) -> list[Any]:
    """Returns all optimizers that Keras saves with a model, not only that of `compile`: a GAN may have two."""
    attributes = _flattened(vars(layer) for layer in layers_of(model))
    return [attribute for attribute in attributes if isinstance(attribute, keras.optimizers.Optimizer)]


def level_counts(model: Any) -> None:
    """Gives an optimizer's ``iterations``, states of seeds, and other integers the value that the first device has.

    To be called after a step that ended with an error, as the last one does where the number of batches is unknown.
    It updates no weights, but counts itself without waiting for data, as in plain Keras: always on the first device,
    and on others by chance.
    """
    for variable in (*model.variables, *(one for optimizer in optimizers(model) for one in optimizer.variables)):
        if keras.backend.is_int_dtype(variable.dtype) and variable.synchronization != "on_read":
            first, *others = private.copies(value_of(variable))
            for copy in others:
                copy.assign(first.read_value(), read_value=False)


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the contents of nested lists, tuples and dictionaries; their keys need no order, unlike `tree.flatten`."""
    for value in values:
        if isinstance(value, dict):
            yield from _flattened(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _flattened(value)
        else:
            yield value


class EqualState(keras_hooks.ModelHooks[DataParallel]):
    """The hook that makes layers' state equal before `evaluate`: `fit` does so, but a custom loop may not."""

    ability = DataParallel

    def evaluate(self, call: TrainerCall) -> None:
        """Averages layers' state over replicas."""
        if self.extended.has_several_replicas and not call.is_within_fit:
            average_state(call.model, self.extended)


def average_state(model: Any, extended: DataParallel) -> None:
    """Makes the state of layers equal on all replicas after a custom training loop.

    Each element becomes the mean over all replicas in which it is finite; integers are not changed.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy.
    """
    variables = [variable for variable in state_of_layers(model) if variable.dtype.startswith(("float", "bfloat"))]
    if not variables:
        return
    sums = []
    for variable in variables:
        parts = [tf.cast(copy.read_value(), tf.float64) for copy in private.copies(value_of(variable))]
        finite = [tf.math.is_finite(part) for part in parts]
        sums.append(tf.add_n([tf.where(known, part, 0.0) for known, part in zip(finite, parts, strict=True)]))
        sums.append(tf.add_n([tf.cast(known, tf.float64) for known in finite]))
    sums = extended.bridge.all_reduce(sums)
    for variable, total, count in zip(variables, sums[::2], sums[1::2], strict=True):
        local_value = tf.cast(private.copies(value_of(variable))[0].read_value(), tf.float64)
        mean = tf.where(count > 0, tf.math.divide_no_nan(total, count), local_value)
        variable.assign(tf.cast(mean, variable.dtype))
