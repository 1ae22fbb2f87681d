"""The steps of training in rounds, in graphs and eagerly: an exchange may follow each update of an optimizer."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engine.host_calls import host_call
from tfdist.engine.packed_tensors import PackedTensors
from tfdist.local_sgd.course import Course, Courses, Live, Progress, Turn, VariableGroup
from tfdist.local_sgd.rules import States
from tfdist.private import tensorflow as private
from tfdist.private.models import value_of
from tfdist.private.optimizers import apply_count, key_of, variables_of


class StepsInRounds:
    """Counter of an optimizer's steps that exchanges its variables with other processes when it is their turn.

    Between two exchanges a step costs three assignments to counters and a conditional that is not taken.

    Args:
        optimizer: a built Keras optimizer of a model under a strategy.
        number: place of the optimizer among those of the strategy.
        courses: factory of the course of the rounds.
        rules: saved states of the rules of its rounds, which they begin with; may be empty.

    Attributes:
        variables: the variables that the optimizer updates.
    """

    def __init__(self, optimizer: Any, number: int, courses: Courses, rules: States) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.variables = variables_of(optimizer)
        self._slots = slots_of(optimizer) if courses.with_slots else []
        paths = [variable.path for variable in (*self.variables, *self._slots)]
        with tf.init_scope(), tf.device("/cpu:0"):
            self._left, self._what = _counter("left"), _counter("turn")
            self._samples, self._step = _counter("samples"), _counter("step")
            live = _Training(self._left, self._step, optimizer)
            centre, rate = Centre(self.variables), float(_rate(optimizer))
            keys = [key_of(variable) for variable in self.variables]
            trained = VariableGroup(f"optimizer {number}", paths, centre, rate, live, rules, keys)
            self._course = courses.of(trained)
        self._lock = threading.Lock()
        with tf.init_scope():
            self._take_over()
            self.begin()

    def _take_over(self) -> None:
        """Takes over the state of processes that began before this one, if there are any."""
        if (joined := self._course.joined) is not None:
            assign(self.variables, [tf.constant(value) for value in self._course.centre])
            assign(self.optimizer.variables, [tf.constant(value) for value in joined.state])
            if joined.rates is not None:
                rates = _rates(self.optimizer)
                assign(rates, [tf.constant(value, read(rates)[0].dtype) for value in joined.rates])
            self._step.assign(np.int64(joined.step))

    def refresh(self, patience: float | None) -> bool:
        """Takes over a newer state of another process.

        Args:
            patience: seconds to wait for the state that another process gives all; None looks once for any newer one.

        Returns:
            Whether there was a newer state.
        """
        with self._lock:
            is_newer = self._course.refresh() if patience is None else self._course.follow(patience)
        if is_newer:
            self._take_over()
            self.begin()
        return is_newer

    @property
    def optimizer(self) -> Any:
        """The Keras optimizer."""
        return self._optimizer()

    @property
    def is_under_way(self) -> bool:
        """Whether this process has taken steps in a round that is not settled."""
        return int(self._step) != self._began

    def take(self, samples: Any) -> None:
        """Counts a step, and makes the exchange whose turn it is; called in the cross-replica context.

        Args:
            samples: number of samples of this process's replicas in the step; a number or a scalar tensor.
        """
        self._samples.assign_add(tf.cast(samples, tf.int64), read_value=False)
        self._step.assign_add(1, read_value=False)
        left = self._left.assign_sub(1, read_value=True)
        tf.cond(left <= 0, self._turn, lambda: tf.constant(False))

    def _turn(self) -> tf.Tensor:
        branches = {what: functools.partial(self._branch, what) for what in range(self._course.turns)}
        if len(branches) == 1:
            return branches[0]()
        if tf.executing_eagerly():
            return branches[int(self._what)]()
        return tf.switch_case(tf.cast(self._what, tf.int32), branches)

    def _branch(self, what: int) -> tf.Tensor:
        everything = [*self.variables, *self._slots]
        chosen = [everything[place] for place in self._course.places(what)]
        values = read(chosen)
        packing = PackedTensors(values)
        replaces = self._course.replaces(what)

        def call(samples: np.ndarray, step: np.ndarray, rate: np.ndarray, *packed: np.ndarray) -> list[np.ndarray]:
            with self._lock:
                progress = Progress(int(samples), int(step))
                turn, new = self._course.take(what, progress, float(rate), packing.arrays(packed))
            # In memory of their own: variables that take over that of a tensor would write into the rounds' arrays.
            return [np.array([turn.left, turn.what], np.int64), *(packing.pack_arrays(new) if replaces else [])]

        results = [tf.TensorSpec([2], tf.int64), *(packing.specs if replaces else [])]
        rate = tf.cast(tf.convert_to_tensor(_rate(self.optimizer)), tf.float64)
        inputs = [self._samples.read_value(), self._step.read_value(), rate, *packing.pack(values)]
        with tf.device("/cpu:0"):
            turn, *new = host_call(call, inputs, results, name="tfdist_round")
            left, following = tf.unstack(turn)
            self._left.assign(left, read_value=False)
            self._what.assign(following, read_value=False)
        if replaces:
            assign(chosen, packing.unpack(new))
        return tf.constant(True)

    # Between steps; eagerly.

    def settle(self) -> bool:
        """Ends the round once all processes have taken their steps; called by all of them.

        Returns:
            Whether any process had taken a step; then `take_centre` must follow.
        """
        has_taken = self.is_under_way
        everything = [*self.variables, *self._slots]
        with self._lock:
            settled = self._course.settle(self.progress, [value.numpy() for value in read(everything)])
        if settled.changes:
            assign(everything, [tf.constant(array) for array in settled.values])
        self._step.assign(np.int64(settled.step))
        return settled.changes or has_taken

    @property
    def course(self) -> Course:
        """The course of the rounds: what is exchanged after which step."""
        return self._course

    @property
    def progress(self) -> Progress:
        """This process's numbers of samples and steps so far."""
        return Progress(int(self._samples), int(self._step))

    @property
    def distance(self) -> float | None:
        """Distance of the processes' variables from their mean when the last round ended; see `Course`."""
        return self._course.distance

    @property
    def staleness(self) -> Counter[int]:
        """How often values of other processes were used, by their age in rounds."""
        return self._course.staleness

    def take_centre(self) -> None:
        """Gives the variables the values that all processes have in common, and begins a round."""
        assign(self.variables, [tf.constant(value) for value in self._course.centre])
        self.begin()

    def begin(self) -> None:
        """Begins a round where none is under way, at the number of steps that a backup has restored, if any."""
        with self._lock:
            self._began = max(int(self._step), int(apply_count(self.optimizer)))
            self._step.assign(np.int64(self._began))
            self._course.learning_rate = float(_rate(self.optimizer))
            self._plan(self._course.begin_anew(Progress(int(self._samples), self._began)))

    def _plan(self, turn: Turn) -> None:
        self._left.assign(turn.left)
        self._what.assign(turn.what)

    def assigned(self, variable: Any) -> bool:
        """Notes that the user's program has assigned a value to a variable, equal on all processes.

        Args:
            variable: a Keras variable; ignored if the optimizer does not update it.

        Returns:
            Whether the optimizer updates the variable.
        """
        for place, candidate in enumerate(self.variables):
            if candidate is variable:
                with self._lock:
                    self._course.assigned(place, read([variable])[0].numpy(), self.progress)
                return True
        if any(candidate is variable for candidate in _rates(self.optimizer)) and not self.is_under_way:
            with self._lock:
                self._course.learning_rate = float(_rate(self.optimizer))
                if (turn := self._course.first(self._began)) is not None:
                    self._plan(turn)
        return False

    def recentre(self) -> None:
        """Makes the current values of all variables, equal on all processes, the centre."""
        for variable in self.variables:
            self.assigned(variable)


class _Training(Live):
    """The `Live` of an optimizer while it trains.

    Args:
        left: counter of the steps left to the next turn.
        step: counter of the steps taken.
        optimizer: a built Keras optimizer.
    """

    def __init__(self, left: tf.Variable, step: tf.Variable, optimizer: Any) -> None:
        self._left, self._step = left, step
        self._state, self._rates = list(optimizer.variables), _rates(optimizer)

    def state(self) -> list[np.ndarray]:
        """Returns copies of the optimizer's own variables."""
        return [np.array(value.numpy()) for value in read(self._state)]

    def rates(self) -> list[float]:
        """Returns the learning rates that can be set."""
        return [float(value.numpy()) for value in read(self._rates)]

    def left(self) -> int:
        """Returns the number of steps left to the next turn."""
        return int(self._left)

    def step(self) -> int:
        """Returns the number of steps taken."""
        return int(self._step)


class Centre(MutableSequence[np.ndarray]):
    """Values of variables that all processes have in common, kept at the variables, which optimizers may share.

    Args:
        variables: Keras variables, each with a value in the centre.
    """

    _ATTRIBUTE = "_tfdist_centre"

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = variables
        for variable, value in zip(variables, read(variables), strict=True):
            if not hasattr(variable, self._ATTRIBUTE):
                setattr(variable, self._ATTRIBUTE, np.array(value.numpy()))

    @classmethod
    def renew(cls, variable: Any) -> None:
        """Makes the current value of a variable the one in the centre, if there is any."""
        if hasattr(variable, cls._ATTRIBUTE):
            setattr(variable, cls._ATTRIBUTE, np.array(read([variable])[0].numpy()))

    def __len__(self) -> int:
        return len(self._variables)

    def __getitem__(self, place: Any) -> Any:
        return getattr(self._variables[place], self._ATTRIBUTE)

    def __setitem__(self, place: Any, value: Any) -> None:
        setattr(self._variables[place], self._ATTRIBUTE, value)

    def __delitem__(self, place: Any) -> None:
        raise TypeError("a centre has a value for each variable")

    def insert(self, index: int, value: Any) -> None:
        """Raises a `TypeError`: each variable has exactly one value."""
        raise TypeError("a centre has a value for each variable")


def slots_of(optimizer: Any) -> list[Any]:
    """Returns an optimizer's slots and means: its floating-point variables without learning rates and loss scales.

    Args:
        optimizer: a Keras optimizer.
    """
    return [
        variable
        for variable in optimizer.variables
        if variable.dtype.startswith(("float", "bfloat")) and variable.name not in ("learning_rate", "dynamic_scale")
    ]


def _rates(optimizer: Any) -> list[Any]:
    """Returns the variables that are learning rates."""
    return [variable for variable in optimizer.variables if variable.name == "learning_rate"]


def _rate(optimizer: Any) -> Any:
    """Returns the learning rate; the first optimizer's of a `keras.optimizers.MultiOptimizer`."""
    return next(iter(getattr(optimizer, "optimizers", ())), optimizer).learning_rate


def _counter(name: str) -> tf.Variable:
    # Not by the creator of a `tf.function` that is traced for the first time, which would be traced once more then.
    zero = tf.constant(0, tf.int64)
    return private.new_variable(None, initial_value=zero, trainable=False, name=f"tfdist_{name}")


def read(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the values of Keras variables, from the first local copy of each.

    Args:
        variables: Keras variables.
    """
    return [private.copies(value_of(variable))[0].read_value() for variable in variables]


def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Gives all local copies of Keras variables new values.

    Args:
        variables: Keras variables.
        values: tensors, one for each variable.
    """
    for variable, value in zip(variables, values, strict=True):
        value = tf.ensure_shape(value, variable.shape)
        for copy in private.copies(value_of(variable)):
            copy.assign(value, read_value=False)
