"""Seams of Keras for a strategy that deals the variables of each optimizer to its processes (ZeRO-1).

In each step every process gets the sums of the gradients of its own variables and rows (reduce-scatter), updates them,
and gets the values of the others from their owners (all-gather).

References:
    Rajbhandari et al., ZeRO: Memory optimizations toward training trillion parameter models, 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.private import tensorflow as private
from tfdist.private.keras import base_optimizer, saving_lib, tf_optimizer
from tfdist.private.optimizers import apply_count, strategy_of, variables_of
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall
from tfdist.sharding import EVERYONE
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.all_reduce import owned_gradients
from tfdist.strategies.divided import described_variables, divided_updates, weight_parts
from tfdist.strategies.divided.dealing import Dealing
from tfdist.strategies.divided_abilities import DealsVariables
from tfdist.strategies.keras import keras_assignments, keras_optimizers


@Once
def install() -> None:
    """Installs the seams, once."""
    described_variables.install()
    divided_updates.install()
    keras_hooks.add(Placed)
    replace(base_optimizer.BaseOptimizer, "build", _dealt)
    replace(base_optimizer.BaseOptimizer, "add_variable", _described)
    replace(tf_optimizer.TFOptimizer, "add_variable_from_reference", _with_its_variable)
    replace(base_optimizer.BaseOptimizer, "_backend_apply_gradients", _by_owners)
    replace(saving_lib, "_load_state", _placed_before_loading)


class Placed(keras_hooks.ModelHooks[DealsVariables]):
    """Hooks that allocate the optimizers' variables of this process before steps are traced."""

    ability = DealsVariables

    def make_function(self, call: TrainerCall) -> None:
        """Allocates the variables."""
        self.extended.place(call.model)


# The optimizer's variables.


def _strategy_of(optimizer: Any) -> DealsVariables | None:
    return current_strategy.of_strategy(strategy_of(optimizer), DealsVariables)


def _dealt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Deals the variables of an optimizer before it makes its own."""

    def build(self: Any, variables: Any) -> Any:
        extended = _strategy_of(self)
        if extended is not None:
            extended.deal(self, list(variables))
        return original(self, variables)

    return build


def _described(original: Callable[..., Any]) -> Callable[..., Any]:
    """Only describes the variables of a dealt optimizer, of which most belong to other processes."""

    def add_variable(self: Any, *args: Any, **kwargs: Any) -> Any:
        extended = _strategy_of(self)
        if extended is None or extended.dealing(self) is None:
            return original(self, *args, **kwargs)
        with described_variables.describing():
            return original(self, *args, **kwargs)

    return add_variable


def _with_its_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_variable_from_reference(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        slot = original(self, reference_variable, *args, **kwargs)
        extended = _strategy_of(self)
        dealing = None if extended is None else extended.dealing(self)
        if dealing is not None:
            dealing.add_slot(slot, reference_variable)
        return slot

    return add_variable_from_reference


def _placed_before_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has each process read a file into the variables that it holds, if all read it; else the reader sends them."""

    def _load_state(saveable: Any, *args: Any, **kwargs: Any) -> Any:
        extended = current_strategy.of_model(saveable, DealsVariables) if isinstance(saveable, keras.Model) else None
        if extended is None:
            return original(saveable, *args, **kwargs)
        extended.place(saveable)
        if described_variables.can_assign():
            return original(saveable, *args, **kwargs)
        with described_variables.assigning(extended.assign_part):
            return original(saveable, *args, **kwargs)

    return _load_state


# Updates.


def _by_owners(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has each process update the variables that are dealt to it."""

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        extended = _strategy_of(self)
        dealing = None if extended is None else extended.ready(self)
        if extended is None or dealing is None or tf.distribute.get_replica_context() is None:
            return original(self, grads, trainable_variables)
        own = [place for place, variable in enumerate(trainable_variables) if dealing.updates(variable)]
        sums = dict(
            enumerate(grads)
        )  # as they are where a layer's backward pass has summed them for the process's rows
        whole = [place for place in sums if not weight_parts.is_part(sums[place], trainable_variables[place])]
        given, variables = [grads[place] for place in whole], [trainable_variables[place] for place in whole]
        owners = [dealing.owner(variable) for variable in variables]
        is_outside = strategy_of(self) is not tf.distribute.get_strategy()  # where no strategy sums
        if keras_optimizers.are_summed() or is_outside:
            parts = [
                owned_gradients.rows_of(gradient, owner, dealing.rank)
                for gradient, owner in zip(given, owners, strict=True)
                if owner.includes(dealing.rank)
            ]
        else:
            parts = owned_gradients.own_sums(extended, given, variables, owners, dealing.rank)
        sums.update(zip((place for place in whole if place in own), parts, strict=True))
        dealing.refresh()
        of_own = [dealing.owner(trainable_variables[place]) for place in own]
        fractions = [1 / owner.copies(dealing.processes) for owner in of_own]
        of_parts = [fraction * owner.is_cut for fraction, owner in zip(fractions, of_own, strict=True)]
        shares = divided_updates.gradient_shares(fractions, of_parts)
        with dealing.parts(), keras_optimizers.summed_before(), shares:
            original(self, [sums[place] for place in own], [trainable_variables[place] for place in own])
        changed = variables_of(self) if self.use_ema else trainable_variables
        steps = self.gradient_accumulation_steps
        if not steps or self.use_ema:
            publish(extended, dealing, changed)
            return None

        def published() -> tf.Tensor:
            publish(extended, dealing, changed)
            return tf.constant(True)

        tf.cond((apply_count(self).value + 1) % steps == 0, published, lambda: tf.constant(False))
        return None

    return _backend_apply_gradients


def publish(extended: DealsVariables, dealing: Dealing, variables: Sequence[Any]) -> None:
    """Sends the values of variables from their owners to all processes; in a replica or outside of all, eagerly.

    Args:
        extended: the strategy's `extended`.
        dealing: how the variables are dealt.
        variables: variables of Keras or TensorFlow; those of which no process keeps all stay as they are.
    """
    variables = [
        variable for variable in variables if weight_parts.of(variable) is None and dealing.owner(variable) != EVERYONE
    ]
    owners = [dealing.owner(variable) for variable in variables]
    own = [
        tf.convert_to_tensor(_copy_of(dealing.part(variable)))
        for variable, owner in zip(variables, owners, strict=True)
        if owner.includes(dealing.rank)
    ]
    specs = [tf.TensorSpec(variable.shape, tf.as_dtype(variable.dtype)) for variable in variables]
    taken = extended.owned.gathered(own, specs, owners, [owned_gradients.name_of(variable) for variable in variables])
    others = [variable for variable, owner in zip(variables, owners, strict=True) if owner.owner != dealing.rank]
    for variable, value in zip(others, taken, strict=True):
        _copy_of(variable).assign(value, read_value=False)
    dealing.refresh()  # frees memory


def _copy_of(variable: Any) -> Any:
    """Returns this process's copy of a variable of Keras or of TensorFlow."""
    is_keras = isinstance(variable, keras.Variable)
    return keras_assignments.copy_of(variable) if is_keras else private.copies(variable)[0]
