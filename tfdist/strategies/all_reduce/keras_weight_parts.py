"""Seams of Keras for a strategy whose processes each keep a part of some weights.

| seam | why |
|---|---|
| `Layer.add_weight`, initial values | such a weight is made whole, cut, and dropped |
| `Operation.__call__` | a layer has its weights whole while it is called |
| `EarlyStopping` | each process keeps the best values of its own parts |
| `export` | what is exported would read weights of other processes |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.private import models
from tfdist.private.keras import layer, operation, symbolic_scope, tf_core, tree
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.divided import gathering, weight_callbacks, weight_parts
from tfdist.strategies.divided.split_axis import Split
from tfdist.strategies.divided.weight_parts import WeightPart
from tfdist.strategies.divided_abilities import KeepsParts
from tfdist.thread_values import ThreadValue

_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)
"""Layers that call others in loops, in which nothing can be gathered: they have the weights of those."""
_ADDED = "_tfdist_added"
"""Attribute of a Keras variable that a layer has added, whose initial value is made later: its `Split`, in a tuple."""


_may_be_cut = ThreadValue(False)
"""Whether a thread's layer adds a weight that may be cut."""
_split: ThreadValue[Split | None] = ThreadValue(None)
"""How a thread's layer that computes in parts wants its weight to be split; None for other layers."""


def splitting(split: Split) -> contextlib.AbstractContextManager[None]:
    """Context in which a layer that computes in parts adds a weight.

    Args:
        split: how the weight is split.
    """
    return _split.set_to(split)


@Once
def install() -> None:
    """Installs the seams, once."""
    keras_hooks.add(InParts)
    replace(layer.Layer, "add_weight", _which_may_be_cut)
    replace(tf_core.Variable, "_initialize_with_initializer", _cut)
    replace(tf_core.Variable, "_deferred_initialize", _left_after_all)
    replace(operation.Operation, "__call__", _with_whole_weights)
    for name in ("on_epoch_end", "on_train_end"):
        replace(keras.callbacks.EarlyStopping, name, _of_own_parts)


class InParts(keras_hooks.ModelHooks[KeepsParts]):
    """Hooks for what reads all weights."""

    ability = KeepsParts

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Replaces callbacks that read weights, so that the writer gets those of all processes."""
        return weight_callbacks.adapted(given, self.extended)

    def export(self, call: TrainerCall) -> None:
        """Refuses to export a model whose weights are not whole.

        Raises:
            ValueError: a weight is not whole.
        """
        in_parts = [variable for variable in call.model.variables if weight_parts.of(variable) is not None]
        if in_parts:
            raise weight_parts.not_exported(in_parts[0])


def _which_may_be_cut(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes weights that layers add, other than those whose updates look at the whole weight."""

    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_strategy.current(KeepsParts) is None:
            return original(self, *args, **kwargs)
        may_be_cut = not (kwargs.get("constraint") or kwargs.get("overwrite_with_gradient"))
        with _may_be_cut.set_to(may_be_cut):
            variable = original(self, *args, **kwargs)
        if may_be_cut and models.initializer_of(variable) is not None and weight_parts.of(variable) is None:
            setattr(variable, _ADDED, (_split.value,))
        return variable

    return add_weight


def _cut(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize_with_initializer(self: Any, initializer: Any) -> None:
        extended = current_strategy.current(KeepsParts)
        added = (_split.value,) if _may_be_cut.value else getattr(self, _ADDED, None)
        if extended is None or added is None or not (self.trainable or added[0]):  # layers of a pair are split, or none
            return original(self, initializer)
        found = extended.parts_of_new(self, *added)
        if found is None:
            return original(self, initializer)
        owner, collectives = found
        with tf.init_scope():
            value = extended.initial_value(self, tf.convert_to_tensor(initializer(self.shape, dtype=self.dtype)))

            def make(rows: Any) -> None:
                with extended.local_only():
                    original(self, rows)

            weight_parts.keep(self, value, owner, extended.group.rank, make, collectives)
        return None

    return _initialize_with_initializer


def _left_after_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps Keras from taking a weight for one with a value, which needs no initializer."""

    def _deferred_initialize(self: Any) -> None:
        original(self)
        kept = weight_parts.of(self)
        if kept is not None:
            kept.leave()

    return _deferred_initialize


def _with_whole_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, keras.layers.Layer) or _only_computes_shapes(args, kwargs):
            return original(self, *args, **kwargs)
        with (
            gathering.within() as is_outermost,
            gathering.calling(_groups_of(self, is_outermost), (args, kwargs)) as finished,
        ):
            return finished(original(self, *args, **kwargs))

    return __call__


def _of_own_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has Keras's callback keep and restore parts; one of another class may look at the whole weights that it keeps."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_keras = type(self) is keras.callbacks.EarlyStopping
        if not is_keras or current_strategy.of_model(self.model, KeepsParts) is None:
            return original(self, *args, **kwargs)
        with weight_parts.only_parts(self.model.weights):
            return original(self, *args, **kwargs)

    return hook


def _only_computes_shapes(*arguments: Any) -> bool:
    given = (isinstance(value, keras.KerasTensor) for value in tree.flatten(arguments))
    return symbolic_scope.in_symbolic_scope() or any(given)


def _groups_of(of: Any, is_outermost: bool) -> list[list[WeightPart]]:
    """Returns the weights to gather for a call of a layer, of which this process keeps some rows.

    Those of layers in it are gathered with its own if it calls them in loops, or if those of a whole model are gathered
    at once; each layer's gradients are summed apart then.

    Args:
        of: the layer.
        is_outermost: whether its call is not within that of another layer.
    """
    if is_outermost:
        groups = [_rows_of([part]) for part in models.layers_of(of)]
        if any(kept.collectives.at_once for group in groups for kept in group):
            return groups
    return [_rows_of(models.layers_of(of) if isinstance(of, _LOOPS) else [of])]


def _rows_of(layers: list[Any]) -> list[WeightPart]:
    variables = (variable for part in layers for variable in models.own_variables(part))
    found = [kept for variable in variables if (kept := weight_parts.of(variable)) is not None]
    return [kept for kept in found if kept.collectives.gathers_for_calls]
