"""Variables that are described and not allocated: a process holds those of its own stages.

Keras has such variables already, for models that are built while a function is traced: they know their shape, dtype and
initializer, and their value is what the initializer makes, each time that it is read. Here they stay so until a process
knows which of them are its own. Reading one of another stage is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.model_parallel.keras_placement_saving import DEVICE
from tfdist.private import tensorflow as private
from tfdist.private.keras import backend, base_optimizer, symbolic_scope, tf_core, tf_optimizer
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.strategies.devices import requested_device

_KEY = "_tfdist_key"
"""Attribute of a variable that was described, of Keras and of TensorFlow: what optimizers know it by."""
_TRAINABLE = "_tfdist_trainable"
"""Attribute of a variable of Keras: whether it was trainable when it was described. Tapes watch only what is trainable
when it is allocated, and a layer that is frozen before that may be trained later."""
_numbers = itertools.count()


Read: TypeAlias = Callable[[Any], Any]
"""Gets the value of a variable that another process holds."""
Assign: TypeAlias = Callable[[Any, Any], None]
"""Takes the value that was to be assigned to a variable that another process holds."""


class _Thread(threading.local):
    """What this thread does with variables.

    Attributes:
        describes: whether those that it makes are only described.
        read: gets values of variables of other processes; None if they cannot be read.
        assign: assigns to them; None if that cannot be done.
    """

    describes = False
    read: Read | None = None
    assign: Assign | None = None


_thread = _Thread()


class ElsewhereError(RuntimeError):
    """The value of a variable was asked for in a process that does not hold it."""


class _Elsewhere:
    """Stands where the initializer of a variable was, which another process holds.

    Args:
        variable: that is held elsewhere.
        place: who holds it, in words.
    """

    def __init__(self, variable: Any, place: str) -> None:
        self._variable = variable
        self._place = place

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        if symbolic_scope.in_symbolic_scope():  # for shapes alone
            return tf.zeros(shape, dtype)
        if _thread.read is None:
            raise self.error()
        return _thread.read(self._variable)

    def error(self) -> ElsewhereError:
        return ElsewhereError(
            f"the variable {self._variable.path} is held by {self._place}, not by this process. Compute with a model "
            "in stages by fit, evaluate, predict and the like; read and assign its weights by get_weights, "
            "set_weights, save and load_weights; all of these on all processes."
        )


@Once
def install() -> None:
    """Installs the seams, once."""
    replace(tf_core.Variable, "_initialize_with_initializer", _described)
    replace(tf_core.Variable, "_deferred_initialize", _described_still)
    replace(tf_core.Variable, "_direct_assign", _allocated_first)
    replace(tf_core.Variable, "_initialize", _with_its_key)
    replace(tf_optimizer.TFOptimizer, "_var_key", _before_it_is_allocated)
    replace(tf_optimizer.TFOptimizer, "add_variable_from_reference", _of_a_description)


@contextlib.contextmanager
def describing() -> Iterator[None]:
    """Context in which Keras variables with an initializer are described only; `install` comes first."""
    before, _thread.describes = _thread.describes, True
    try:
        yield
    finally:
        _thread.describes = before


@contextlib.contextmanager
def reading(read: Read) -> Iterator[None]:
    """Context in which variables of other processes can be read.

    Args:
        read: gets a value.
    """
    before, _thread.read = _thread.read, read
    try:
        yield
    finally:
        _thread.read = before


@contextlib.contextmanager
def assigning(assign: Assign) -> Iterator[None]:
    """Context in which values can be assigned to variables of other processes.

    Args:
        assign: takes a value; it may do nothing, where the other process assigns it itself.
    """
    before, _thread.assign = _thread.assign, assign
    try:
        yield
    finally:
        _thread.assign = before


def can_assign() -> bool:
    """Whether the caller is inside `assigning`."""
    return _thread.assign is not None


def is_elsewhere(variable: Any) -> bool:
    """Whether another process holds a variable.

    Args:
        variable: of Keras.
    """
    return is_described(variable) and isinstance(variable._initializer, _Elsewhere)


def is_described(variable: Any) -> bool:
    """Whether a variable has no memory in this process.

    Args:
        variable: of Keras.
    """
    return variable._value is None


def allocate(variable: Any) -> None:
    """Gives a variable its memory, and the value that its initializer makes, if it has none.

    Args:
        variable: of Keras, in the scope of its strategy.
    """
    if is_described(variable):
        before, _thread.describes = _thread.describes, False
        trainable, variable.trainable = variable.trainable, getattr(variable, _TRAINABLE, variable.trainable)
        try:
            variable._deferred_initialize()
        finally:
            _thread.describes, variable.trainable = before, trainable


def leave_to(variable: Any, place: str) -> None:
    """Frees a variable's memory, which another process holds.

    Args:
        variable: of Keras.
        place: who holds it, for messages.
    """
    variable._value = None
    variable._initializer = _Elsewhere(variable, place)


def _describe(variable: Any) -> None:
    setattr(variable, _KEY, f"described {next(_numbers)}")
    setattr(variable, _TRAINABLE, variable.trainable)


def _described(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize_with_initializer(self: Any, initializer: Any) -> None:
        if not _thread.describes:
            return original(self, initializer)
        self._value = None
        self._initializer = initializer
        _describe(self)
        return None

    return _initialize_with_initializer


def _described_still(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where Keras has described a variable, as while it traces, it would allocate it afterwards."""

    def _deferred_initialize(self: Any) -> None:
        if not _thread.describes:
            return original(self)
        if not hasattr(self, _KEY):
            _describe(self)
        return None

    return _deferred_initialize


def _with_its_key(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize(self: Any, value: Any) -> None:
        original(self, value)
        if hasattr(self, _KEY):
            setattr(self._value, _KEY, getattr(self, _KEY))

    return _initialize


def _before_it_is_allocated(original: Callable[..., Any]) -> Callable[..., Any]:
    """Optimizers know variables by what TensorFlow calls them, which a variable has only once it is allocated."""

    def _var_key(self: Any, variable: Any) -> Any:
        key = getattr(variable, _KEY, None) or getattr(_container_of(variable), _KEY, None)
        return original(self, variable) if key is None else key

    return _var_key


def _container_of(variable: Any) -> Any:
    """The distributed variable that a variable of TensorFlow is a part of; None if it is none."""
    if isinstance(variable, backend.Variable) or private.is_distributed_variable(variable):
        return None
    for part in (variable, getattr(variable, "handle", None)):
        container = private.container_of(part)
        if container is not None:
            return container
    return None


def _of_a_description(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras reads a variable to make an optimizer's beside it, which would make its value."""

    def add_variable_from_reference(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(reference_variable, backend.Variable) or not is_described(reference_variable):
            return original(self, reference_variable, *args, **kwargs)
        device = getattr(reference_variable, DEVICE, None)
        with contextlib.nullcontext() if device is None else requested_device.requested(device):
            return base_optimizer.BaseOptimizer.add_variable_from_reference(self, reference_variable, *args, **kwargs)

    return add_variable_from_reference


def _allocated_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Assigning a value to a variable that is described allocates it, unless it is elsewhere."""

    def _direct_assign(self: Any, value: Any) -> None:
        if is_described(self):
            if is_elsewhere(self):
                if _thread.assign is None:
                    raise self._initializer.error()
                return _thread.assign(self, value)
            with tf.init_scope():
                allocate(self)
        return original(self, value)

    return _direct_assign
