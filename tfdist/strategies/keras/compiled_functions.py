"""Compiles functions of Keras objects by XLA, within a graph that XLA does not compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.engine import host_calls
from tfdist.private import models
from tfdist.private.keras import backend, tree
from tfdist.strategies.keras.keras_assignments import note_origin


def can_take(value: Any) -> bool:
    """Returns whether a component of a batch may be an argument of a function that XLA compiles."""
    return value is None or (isinstance(value, tf.Tensor) and value.dtype not in (tf.string, tf.variant))


def call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[tf.Tensor]]:
    """Calls a function compiled by XLA, and makes the function's assignments to Keras variables afterwards.

    Args:
        function: function to compile. It may return tensors and other objects, in structures that Keras's `tree` knows.
            An argument that it returns does not pass through the compiled code.
        arguments: arguments of the function, in such structures, too.

    Returns:
        The result of the function; the losses that layers have added in it.

    Raises:
        HostCallError: the function calls the host.
    """
    given = [leaf for leaf in tree.flatten(arguments) if isinstance(leaf, tf.Tensor)]
    traced = _Traced(function, arguments)
    compiled = tf.function(traced, autograph=False, jit_compile=True)
    of_outputs, losses, of_state = compiled([_with_kept(tensor) for tensor in given])
    for (variable, inner), value in zip(traced.state, of_state, strict=True):
        variable.assign(value)
        note_origin(variable, inner)
    return traced.outputs(given, of_outputs), losses


class _Traced:
    """A function of tensors only, which traces a function of Keras objects when it is called.

    Args:
        function: the function of Keras objects.
        arguments: arguments of the function; tensors among them are replaced by those of the graph.

    Attributes:
        state: the variables that the function assigns to, and their values in its graph.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        self._function = function
        self._arguments = arguments
        self._structure: Any = None
        self.state: list[tuple[Any, tf.Tensor]] = []

    def __call__(self, given: list[Any]) -> Any:
        """Returns the tensors among the function's outputs, the losses that layers have added, and the new state."""
        scope = _Scope()
        inside = [_with_what_is_kept(*argument) for argument in given]
        numbers = {id(argument): number for number, argument in enumerate(inside)}
        following = iter(inside)
        arguments = tree.map_structure(
            lambda leaf: next(following) if isinstance(leaf, tf.Tensor) else leaf, self._arguments
        )
        with scope, host_calls.refused():
            outputs = self._function(*arguments)
        returned: list[Any] = []

        def noted(leaf: Any) -> Any:
            if not isinstance(leaf, (tf.Tensor, tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)):
                return leaf  # also a Keras variable, which TensorFlow would take for a tensor
            if id(leaf) in numbers:
                return _Place(numbers[id(leaf)], True)
            returned.append(_with_kept(leaf))
            return _Place(len(returned) - 1, False)

        self._structure = tree.map_structure(noted, outputs)
        self.state = scope.state()
        return returned, scope.losses, [value for _, value in self.state]

    def outputs(self, given: list[tf.Tensor], returned: list[Any]) -> Any:
        """Returns the function's outputs, with tensors from outside of its graph."""

        def output_of(leaf: Any) -> Any:
            if not isinstance(leaf, _Place):
                return leaf
            return given[leaf.number] if leaf.is_argument else _with_what_is_kept(*returned[leaf.number])

        return tree.map_structure(output_of, self._structure)


class _Place:
    """The origin of a tensor among the outputs: an argument, or a tensor that the graph returns.

    Args:
        number: index of the tensor among the arguments, or among the returned tensors.
        is_argument: whether the tensor is an argument.
    """

    def __init__(self, number: int, is_argument: bool) -> None:
        self.number = number
        self.is_argument = is_argument


class _Scope(backend.StatelessScope):
    """A stateless scope that records the values assigned to variables, and the losses that layers add."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._updated: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Records an assignment to a variable; see `keras.StatelessScope`."""
        self._updated[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: Any) -> Any:
        """Returns a variable's assigned value, else its own: Keras's scope would give regularizers None then."""
        value = super().get_current_value(variable)
        return models.value_of(variable) if value is None else value

    def state(self) -> list[tuple[Any, tf.Tensor]]:
        """Returns the variables that were assigned to, and their values."""
        return [
            (variable, tf.cast(self.get_current_value(variable), variable.dtype)) for variable in self._updated.values()
        ]


def _with_kept(tensor: Any) -> tuple[Any, Any, Any]:
    """Returns a tensor with the mask and the logits that Keras keeps with it, each None if there is none."""
    return tensor, backend.get_keras_mask(tensor), models.logits_of(tensor)


def _with_what_is_kept(tensor: Any, mask: Any, logits: Any) -> Any:
    if mask is not None:
        backend.set_keras_mask(tensor, mask)
    if logits is not None:
        models.set_logits(tensor, logits)
    return tensor
