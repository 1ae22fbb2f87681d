"""Variables that are described but not allocated, since a process allocates only those that it holds.

Keras has such variables for models that are built while a function is traced: they know their shape, dtype and
initializer, and each read makes the value anew by the initializer. Here variables stay described until the process
knows which of them it holds. Reading a variable of another process is an error.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.private import tensorflow as private
from tfdist.private.keras import backend, base_optimizer, symbolic_scope, tf_core, tf_optimizer
from tfdist.private.models import shaped
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.sharding import shape_of
from tfdist.strategies.devices import requested_device
from tfdist.strategies.devices.requested_device import DEVICE
from tfdist.strategies.keras import keras_assignments
from tfdist.thread_values import ThreadValue

_KEY = "_tfdist_key"
"""Attribute of a Keras or TensorFlow variable that was described: the key by which optimizers know the variable."""
_TRAINABLE = "_tfdist_trainable"
"""Attribute of a Keras variable: whether it was trainable when it was described. Gradient tapes watch only variables
that are trainable when they are allocated, and a layer that is frozen before that may be trained later."""
_WHOLE = "_tfdist_whole"
"""Attribute of a Keras variable that is a part for a time: the shape of the whole variable, and the part's index."""
IN_PARTS = "all processes, of which each has a part"
"""Description of the holders of a variable that is cut, for messages."""
_numbers = itertools.count()


Read: TypeAlias = Callable[[Any], Any]
"""Function that returns the value of a variable that another process holds."""
Assign: TypeAlias = Callable[[Any, Any], None]
"""Function that gets a variable that another process holds, and the value to assign to it."""


_describes = ThreadValue(False)
"""Whether new variables of a thread are only described."""
_read: ThreadValue[Read | None] = ThreadValue(None)
"""Returns values of variables of other processes to a thread; None if they cannot be read."""
_assign: ThreadValue[Assign | None] = ThreadValue(None)
"""Assigns a thread's values to variables of other processes; None if that is not possible."""


class ElsewhereError(RuntimeError):
    """Error for access to the value of a variable that another process holds."""


class _RemoteInitializer:
    """Replaces the initializer of a variable that another process holds.

    Args:
        variable: the variable that another process holds.
        place: description of the holder, for messages.
        read: reads the variable outside of `reading`; None if that is an error.
        assign: assigns to the variable outside of `assigning`; None if that is an error.
    """

    def __init__(self, variable: Any, place: str, read: Read | None = None, assign: Assign | None = None) -> None:
        self._variable = variable
        self._place = place
        self._read = read
        self._assign = assign

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        if symbolic_scope.in_symbolic_scope():  # only shapes are computed
            return tf.zeros(shape, dtype)
        read = _read.value or self._read
        if read is None:
            raise self._error()
        return read(self._variable)

    def assigned(self, value: Any) -> None:
        """Assigns a value to the variable, on whichever process it is."""
        assign = _assign.value or self._assign
        if assign is None:
            raise self._error()
        assign(self._variable, value)

    def _error(self) -> ElsewhereError:
        return ElsewhereError(
            f"the variable {self._variable.path} is held by {self._place}. Variables of other processes are read and "
            "assigned by the model's get_weights, set_weights, save and load_weights, and a model in stages computes "
            "by its fit, evaluate and predict: call each of these methods of the model on all processes. For anything "
            "else, such as quantize or set_weights of a layer, save the model, and load it outside of the scope."
        )


@Once
def install() -> None:
    """Installs the seams, once."""
    replace(tf_core.Variable, "_initialize_with_initializer", _defer_initialization)
    replace(tf_core.Variable, "_deferred_initialize", _keep_deferred)
    replace(tf_core.Variable, "_direct_assign", _allocate_before_assign)
    replace(tf_core.Variable, "_initialize", _with_its_key)
    replace(tf_core.Variable, "_serialize_to_tensors", _not_in_checkpoints)
    replace(tf_optimizer.TFOptimizer, "_var_key", _key_before_allocation)
    replace(tf_optimizer.TFOptimizer, "add_variable_from_reference", _slot_without_read)


def describing() -> contextlib.AbstractContextManager[None]:
    """Context in which new Keras variables with an initializer are only described; call `install` first."""
    return _describes.set_to(True)


def reading(read: Read) -> contextlib.AbstractContextManager[None]:
    """Context in which variables of other processes can be read.

    Args:
        read: returns the value of a variable.
    """
    return _read.set_to(read)


def assigning(assign: Assign) -> contextlib.AbstractContextManager[None]:
    """Context in which values can be assigned to variables of other processes.

    Args:
        assign: gets a variable and a value; it may do nothing if the other process assigns the value itself.
    """
    return _assign.set_to(assign)


def can_assign() -> bool:
    """Returns whether the caller is inside `assigning`."""
    return _assign.value is not None


def is_elsewhere(variable: Any) -> bool:
    """Returns whether another process holds a variable.

    Args:
        variable: a Keras variable, or one of TensorFlow, which is never elsewhere.
    """
    return is_described(variable) and isinstance(variable._initializer, _RemoteInitializer)


def is_described(variable: Any) -> bool:
    """Returns whether a variable has no memory in this process.

    Args:
        variable: a variable of Keras or TensorFlow.
    """
    return getattr(variable, "_value", variable) is None


def allocate(variable: Any, initializer: Any = None) -> None:
    """Allocates a variable that has no memory, with the value that an initializer makes.

    Args:
        variable: a Keras variable; the caller is in the scope of its strategy.
        initializer: by default, the variable's own.
    """
    if is_described(variable):
        variable._initializer = initializer or variable._initializer
        trainable, variable.trainable = variable.trainable, getattr(variable, _TRAINABLE, variable.trainable)
        try:
            with _describes.set_to(False):
                variable._deferred_initialize()
        finally:
            variable.trainable = trainable


def leave_to(variable: Any, place: str) -> None:
    """Frees a variable's memory, since another process holds the variable.

    Args:
        variable: a Keras variable.
        place: description of the holder, for messages.
    """
    leave(variable, f"{place}, not by this process")


def keep_part(variable: Any, part: tuple[slice, ...]) -> Any:
    """Allocates a part of a variable, and leaves the others to other processes.

    Args:
        variable: a Keras variable without memory, whose initializer makes equal elements; the caller is in the scope
            of its strategy.
        part: index of the part.

    Returns:
        The part, as the value of a Keras variable.
    """
    with shaped(variable, shape_of(variable.shape, part)):
        allocate(variable)
    kept = variable._value
    leave(variable, IN_PARTS)
    return kept


def part_of(variable: Any, part: tuple[slice, ...], key: str) -> Any:
    """Returns a part of a variable as the value of a Keras variable; the variable keeps its memory.

    Args:
        variable: a Keras variable; the caller is in the scope of its strategy.
        part: index of the part.
        key: key by which an optimizer knows the variable.
    """
    with tf.init_scope():  # of the same name, as weight decay is left out by names
        kept = tf.Variable(keras_assignments.copy_of(variable)[part], trainable=False, name=variable.name)
    setattr(kept, _KEY, key)
    return kept


@contextlib.contextmanager
def standing_in(parts: Iterable[tuple[Any, tuple[slice, ...], Any]]) -> Iterator[None]:
    """Context in which Keras variables are only parts of themselves.

    Args:
        parts: for each variable, the Keras variable, the part's index, and its value, as `keep_part` returns it.
    """
    with contextlib.ExitStack() as stack:
        for variable, part, value in parts:
            stack.callback(setattr, variable, _WHOLE, None)
            setattr(variable, _WHOLE, (variable.shape, part))
            stack.enter_context(shaped(variable, shape_of(variable.shape, part)))
            stack.callback(setattr, variable, "_value", variable._value)
            variable._value = value
        yield


def whole_of(variable: Any) -> tuple[Any, tuple[slice, ...] | None]:
    """Returns the shape of a variable, and the index of the part that it is; None for all.

    Args:
        variable: a variable of Keras or TensorFlow, which may be in `standing_in`.
    """
    return getattr(variable, _WHOLE, None) or (variable.shape, None)


def leave(variable: Any, place: str, read: Read | None = None, assign: Assign | None = None) -> None:
    """Frees a variable's memory.

    Args:
        variable: a Keras variable.
        place: description of who holds the variable, for messages.
        read: reads the variable outside of `reading`; None if that is an error.
        assign: assigns to the variable outside of `assigning`; None if that is an error.
    """
    variable._value = None
    variable._initializer = _RemoteInitializer(variable, place, read, assign)


def describe(variable: Any) -> None:
    """Gives a variable the key by which optimizers know it, unless it has one, whether it has a value or not.

    Args:
        variable: a Keras variable.
    """
    if hasattr(variable, _KEY):
        return
    setattr(variable, _KEY, f"described {next(_numbers)}")
    setattr(variable, _TRAINABLE, variable.trainable)


def _defer_initialization(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize_with_initializer(self: Any, initializer: Any) -> None:
        if not _describes.value:
            return original(self, initializer)
        self._value = None
        self._initializer = initializer
        describe(self)
        return None

    return _initialize_with_initializer


def _keep_deferred(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps variables described that Keras has described while tracing, and would now allocate."""

    def _deferred_initialize(self: Any) -> None:
        if not _describes.value:
            return original(self)
        describe(self)
        return None

    return _deferred_initialize


def _with_its_key(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize(self: Any, value: Any) -> None:
        original(self, value)
        if hasattr(self, _KEY):
            setattr(self._value, _KEY, getattr(self, _KEY))

    return _initialize


def _key_before_allocation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives optimizers a key for each variable, since TensorFlow's own key exists only after the allocation."""

    def _var_key(self: Any, variable: Any) -> Any:
        for known in (variable, getattr(variable, "_value", None), _container_of(variable)):
            key = getattr(known, _KEY, None)
            if key is not None:
                return key
        return original(self, variable)

    return _var_key


def _container_of(variable: Any) -> Any:
    """Returns the distributed variable that a TensorFlow variable is a part of; None if there is none."""
    if isinstance(variable, backend.Variable) or private.is_distributed_variable(variable):
        return None
    for part in (variable, getattr(variable, "handle", None)):
        container = private.container_of(part)
        if container is not None:
            return container
    return None


def _slot_without_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adds an optimizer's variable without Keras's read of the described variable, which would make its value."""

    def add_variable_from_reference(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(reference_variable, backend.Variable) or not is_described(reference_variable):
            return original(self, reference_variable, *args, **kwargs)
        device = getattr(reference_variable, DEVICE, None)
        with contextlib.nullcontext() if device is None else requested_device.requested(device):
            return base_optimizer.BaseOptimizer.add_variable_from_reference(self, reference_variable, *args, **kwargs)

    return add_variable_from_reference


def _allocate_before_assign(original: Callable[..., Any]) -> Callable[..., Any]:
    """Allocates a described variable before an assignment, unless another process holds it."""

    def _direct_assign(self: Any, value: Any) -> None:
        if is_described(self):
            if is_elsewhere(self):
                return self._initializer.assigned(value)
            with tf.init_scope():
                allocate(self)
        return original(self, value)

    return _direct_assign


def _not_in_checkpoints(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses that a `tf.train.Checkpoint` writes a variable that has no memory here, or prepares to read it."""

    def _serialize_to_tensors(self: Any) -> Any:
        if not is_described(self):
            return original(self)
        raise ElsewhereError(
            f"tf.train.Checkpoint cannot write or read the variable {self.path}, which is not on every process: write "
            "and read the model by save, save_weights and load_weights, or leave the optimizer out of the checkpoint"
        )

    return _serialize_to_tensors
