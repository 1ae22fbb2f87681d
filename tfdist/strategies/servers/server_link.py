"""The link between a Keras optimizer and the parameter servers: gradients leave the graph, and new values enter it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.engine.host_calls import host_call
from tfdist.errors import TfdistError
from tfdist.notices import warn_once
from tfdist.parameter_server.dealing.epochs import number_of
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.protocol.report import ModelReport
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.shard import slots as slots_of
from tfdist.parameter_server.shard.store import is_elementwise
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.model import Model
from tfdist.parameter_server.worker.observer import Observer
from tfdist.parameter_server.worker.session import Session, Vectors
from tfdist.private import optimizers
from tfdist.private.models import value_of
from tfdist.strategies.servers.server_vectors import PushAnswerLayout, kinds_of, tensors_for_server
from tfdist.tensors import to_array

_STAYS = (
    "tfdist: a variable of the optimizer %s was assigned to, but parameter servers go on with theirs: only "
    "weights and the learning rate can be assigned. To go back to an earlier state, load a new model."
)


@dataclass(frozen=True)
class Attachment:
    """How a task attaches the variables of an optimizer to the servers.

    Attributes:
        connections: a connection to each server.
        worker: number of this task; 0 is the chief, which gives the first values and the learning rate.
        arguments: the strategy's arguments.
        begun: names of the models that this task has attached before.
        program: digest of the place in the program, as `tfdist.parameter_server.protocol.messages.Attach` has it.
        over: set when the job is over, for an evaluator, which only reads; None for a worker.
    """

    connections: Sequence[Connection]
    worker: int
    arguments: Arguments
    begun: Sequence[str] = ()
    program: int = 0
    over: threading.Event | None = None


class Link:
    """Link of one optimizer to its variables on the servers. Made eagerly, when its first update is traced.

    Args:
        attachment: how this task attaches them.
        optimizer: the Keras optimizer, built; its slots stay as they are here, until `fetch`.
        variables: the Keras variables, which get the servers' values.

    Attributes:
        ids: the variables' `id`s.
        failure: the error that has ended the communication, or None.
        last_ticket: ticket of the batch whose gradients were sent last; -1 if it was not dealt.
    """

    def __init__(self, attachment: Attachment, optimizer: Any, variables: Sequence[Any]) -> None:
        connections, worker, arguments = attachment.connections, attachment.worker, attachment.arguments
        self._optimizer = optimizer
        self._variables = list(variables)
        self.ids = {id(variable) for variable in variables}
        rate = optimizers.learning_rate(optimizer)
        self._of_servers = {id(variable) for variable in optimizer.variables if variable is not rate}
        self._is_chief = worker == 0
        self._is_lazy = arguments.is_lazy
        # Where each gradient is an update of its own, its norm is that of all variables, on any number of servers.
        self._clips = not arguments.averages and not optimizer.gradient_accumulation_steps
        self._on_servers = self._optimizer_on_servers()
        splits = self._splits()
        self._model = Model(
            [variable.path for variable in variables],
            [tuple(variable.shape) for variable in variables],
            [np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype) for variable in variables],
            len(connections),
            [splits and variable.constraint is None for variable in variables],
            self._name(),
            self._options(),
        )
        compression = arguments.compression
        self._packers = [] if compression is None else self._model.packers(compression, worker)
        if attachment.over is None:
            self._session = Session(
                connections,
                worker,
                self._model,
                tuple(attachment.begun),
                arguments.gradients.prefetch,
                arguments.pull_compression,
                program=attachment.program,
            )
        else:
            self._session = Observer(connections, self._model, attachment.over)
        self._successor = ""
        self._lock = threading.Lock()
        self._read: Callable[[], Sequence[np.ndarray]] = list
        self.failure: TfdistError | None = None
        self.last_ticket = -1
        self._is_assigned = False
        self._finals: list[np.ndarray] | None = None  # averages, from the end of `fit` to the next step
        on_servers = keras.saving.serialize_keras_object(self._on_servers)
        self._assign(self._session.begin(self._held(), on_servers, self._state if self._is_chief else None))

    @property
    def session(self) -> Session:
        """The connections to the servers."""
        return self._session

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def averages_here(self) -> bool:
        """Whether moving averages of the values are kept here, not on the servers."""
        return False

    def update(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        samples: Any = 1.0,
        apply: Callable[[], None] = lambda: None,
        ticket: Any = None,
    ) -> None:
        """Sends gradients and assigns the new values; in the graph under construction, or eagerly.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None.
            variables: Keras variables of the gradients; some or all of the optimizer's.
            samples: weight of the gradients where those of several workers are averaged; a number or a scalar tensor.
            apply: function that would make the update here; called by subclasses only.
            ticket: ticket of the batch, an int64 scalar; None if the batch was not dealt.

        Raises:
            ValueError: a variable is not one of the optimizer's, or cannot be lazy.
        """
        if not tf.executing_eagerly():
            self.suspend()  # others need not wait while a graph is made
        gradients = self._prepared(self._placed(gradients, variables))
        self._check_lazy(gradients)
        kinds = kinds_of(gradients, self._model)
        given = [tensors_for_server(server, gradients, self._model) for server in range(len(kinds))]
        ends = list(itertools.accumulate(map(len, given), initial=0))
        cuts = [slice(*pair) for pair in itertools.pairwise(ends)]
        rate = optimizers.learning_rate(self._optimizer)
        sends_rate = self._is_chief and isinstance(rate, keras.Variable)

        def on_host(samples: np.ndarray, *given: np.ndarray) -> list[np.ndarray]:
            rest = iter(given)
            current_rate = float(next(rest)) if sends_rate else None
            self.last_ticket = -1 if ticket is None else int(next(rest))
            arrays = list(rest)
            pushed = [
                PushedGradients.received(server_kinds, arrays[cut], shapes)  # checked before any server has it
                for server_kinds, cut, shapes in zip(kinds, cuts, self._model.shapes, strict=True)
            ]
            ticket_number = None if ticket is None else number_of(self.last_ticket)
            if self._is_assigned or self._finals is not None:  # by a callback or a loop, or at the end of `fit`
                with self._lock, self._failing():
                    self._put_assigned()
            vectors = self._step(pushed, float(samples), current_rate, ticket_number)
            return [np.array(self._session.iterations, np.int64), *itertools.chain.from_iterable(vectors)]

        inputs = [
            tf.cast(samples, tf.float64),
            *([tf.convert_to_tensor(rate.value)] if sends_rate else []),
            *([] if ticket is None else [ticket]),
        ]
        answered = PushAnswerLayout(kinds, self._model)
        results = [tf.TensorSpec([], tf.int64), *answered.specs]
        iterations, *tensors = host_call(
            on_host, [*inputs, *(part for shard in given for part in shard)], results, name="tfdist_servers"
        )
        answered.assign_to(self._variables, tensors)
        count = optimizers.apply_count(self._optimizer)
        count.assign(tf.cast(iterations, count.dtype))

    def refresh(self) -> None:
        """Assigns the newest values, from which training goes on.

        First, the chief gives servers what its program has assigned in the meantime, and averages, if `fit` has ended
        with them since the last step.
        """
        with self._lock, self._reading():
            self._assign(self._session.pull())

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Context that reads the servers' values, after the chief has given them what its program has assigned.

        The programs of all workers assign the same. So where the servers have nothing newer, because the chief has not
        come to its reading, another worker keeps what its program has assigned.
        """
        has_assigned = self._is_assigned or self._finals is not None
        if self._is_chief or not has_assigned or isinstance(self._session, Observer):
            self._put_assigned()
            yield
            return
        assigned, before = [array_of(variable) for variable in self._variables], self._session.settle()
        yield
        now = self._session.values()
        is_newer = [new.tobytes() != old.tobytes() for new, old in zip(now, before, strict=True)]
        self._is_assigned = self._is_assigned and not all(is_newer)
        if not all(is_newer):
            self._keep([new if newer else own for new, newer, own in zip(now, is_newer, assigned, strict=True)])

    def _keep(self, arrays: Sequence[np.ndarray]) -> None:
        """Assigns values that the servers have only in part."""
        self._session.forget()
        self._take(arrays)

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """Context in which the variables have the newest values; no worker waits for this one."""
        self.suspend()
        if not self._has_finals():
            self.refresh()
        self._take_final()
        yield

    @contextlib.contextmanager
    def newest_state(self) -> Iterator[None]:
        """Context like `newest`, in which the optimizer's slots and scalars, too, are as they are to be saved."""
        self.suspend()
        if self._has_finals():
            with self._lock:
                state = self._session.state()
            self._assign_to_optimizer(state)
        else:
            self.fetch()
        self._take_final()
        yield

    def suspend(self, is_end: bool = False) -> None:
        """Tells servers that other workers need not wait for this one until its next update.

        Args:
            is_end: whether a call of `fit` has ended; then workers that take every step together do not wait either.
        """
        with self._lock:
            self._session.suspend(is_end)

    def fetch(self) -> None:
        """Assigns values and the optimizer's slots and scalars, as they are to be saved.

        The chief keeps its learning rate, which it sends with each step, as a callback may have set it since the last
        one. All other scalars are the servers'.
        """
        with self._lock, self._reading():
            state = self._session.state()
            self._assign_arrays(state.values)
        self._assign_to_optimizer(state)

    def _assign_to_optimizer(self, state: TrainingState) -> None:
        slots, scalars = self._of_optimizer()
        for slot in slots:
            if slot.name in state.slots[slot.variable]:
                value_of(slot.value).assign(state.slots[slot.variable][slot.name])
        for name, variable in scalars.items():
            is_own = self._is_chief and variable is optimizers.learning_rate(self._optimizer)
            if name in state.scalars and not is_own:
                value_of(variable).assign(state.scalars[name])

    def finalize(self) -> None:
        """Assigns moving averages of the values, if the optimizer keeps them.

        They become the newest values when the chief goes on to train: other workers' `fit` may not have ended.
        """
        with self._lock:
            self._finals = self._session.averages()
            self._session.forget()
        self._take(self._finals)
        self._is_assigned = False

    def _take_final(self) -> None:
        """Assigns the newest averages after `fit`, unless the variables have what the program has assigned since."""
        if self._finals is not None and not self._is_assigned:
            with self._lock:
                self._finals = self._session.final()
            self._take(self._finals)

    def _has_finals(self) -> bool:
        """Returns whether this is the chief, and has the averages that its `fit` has ended with."""
        if not self._is_chief or self._finals is None:
            return False
        pairs = zip(self._variables, self._finals, strict=True)
        return all(array_of(variable).tobytes() == final.tobytes() for variable, final in pairs)

    def newest_version(self) -> int:
        """Returns the number of updates that the servers' parameters contain now; for evaluators only."""
        with self._lock:
            assert isinstance(self._session, Observer)
            return self._session.newest_version()

    def report(self) -> ModelReport:
        """Returns what the servers have done so far for these variables."""
        with self._lock:
            return self._session.report()

    def close(self) -> None:
        """Leaves the servers."""
        self._session.close()

    def hand_over(self, successor: Any) -> None:
        """Reads the newest values and slots, and leaves the variables to another optimizer.

        Args:
            successor: the other optimizer.
        """
        self.fetch()
        with self._lock:
            self._session.close(is_over=True)
            self._successor = successor.name

    def assigned(self, variable: Any) -> None:
        """Notes that the program has assigned a value to a variable.

        The chief's next step gives a weight to the servers. Variables of the optimizer stay those of the servers, which
        is said once.

        Args:
            variable: a Keras variable, of the model or of anything else.
        """
        if id(variable) in self.ids:
            self._is_assigned = True
        elif id(variable) in self._of_servers and not self.averages_here:
            warn_once(_STAYS, self._optimizer.name)

    def _put_assigned(self) -> None:
        """Gives the servers what the chief's program has assigned, by `load_weights`, `set_weights` or a callback.

        Of the averages that `fit` has ended with, it gives those that there are now.
        """
        self._is_assigned = False
        if not self._is_chief:
            return
        arrays = self._session.final() if self._has_finals() else [array_of(variable) for variable in self._variables]
        self._finals = None
        if any(array.tobytes() != other.tobytes() for array, other in zip(arrays, self._read(), strict=True)):
            self._session.put(arrays)

    def _placed(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns a gradient for each variable of the optimizer; None for variables that are not given."""
        by_id = {id(variable): gradient for gradient, variable in zip(gradients, variables, strict=True)}
        unknown = [variable.path for variable in variables if id(variable) not in self.ids]
        if unknown:
            raise ValueError(
                f"the optimizer {self._optimizer.name} was built without {', '.join(unknown[:3])}. Call `compile` "
                "again after a change of `trainable`, or build the optimizer on all variables."
            )
        return [by_id.get(id(variable)) for variable in self._variables]

    def _check_lazy(self, gradients: Sequence[Any]) -> None:
        for variable, gradient in zip(self._variables, gradients, strict=True):
            if self._is_lazy and isinstance(gradient, tf.IndexedSlices) and variable.constraint is not None:
                raise ValueError(
                    f'sparse="lazy" updates some rows of {variable.path}, and its constraint acts on all of them: use '
                    'sparse="exact", or no constraint'
                )

    def _step(
        self, pushed: Sequence[PushedGradients], samples: float, rate: float | None, ticket: int | None = None
    ) -> Vectors:
        with self._lock, self._failing():
            if self._successor:
                raise TfdistError(
                    f"the optimizer {self._optimizer.name} has left its variables to {self._successor}. Parameter "
                    "servers do not update variables by two optimizers in turn: use one optimizer, or call `compile` "
                    "again before you train with the other one."
                )
            step = self._session.pushes
            packed = [packer.packed(gradients, step) for packer, gradients in zip(self._packers, pushed, strict=False)]
            vectors = self._session.step(packed or pushed, samples, rate, ticket)
            self._read = self._session.values
            self._finals = None
            return vectors

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Context that keeps an error, as TensorFlow raises another one in its place."""
        try:
            yield
        except TfdistError as error:
            self.failure = error
            raise

    def _name(self) -> str:
        """Returns the part of the model's name that describes the optimizer."""
        return type(self._optimizer).__name__

    def _options(self) -> list[str]:
        """Describes the numbers and words among the optimizer's options, which are the same on all workers."""
        config = self._optimizer.get_config()
        return [
            f"{name}={value}"
            for name, value in sorted(config.items())
            if name not in ("name", "learning_rate") and isinstance(value, (str, int, float, type(None)))
        ]

    def _splits(self) -> bool:
        """Returns whether variables without a constraint may be split by rows."""
        return is_elementwise(self._on_servers)

    def _optimizer_on_servers(self) -> Any:
        """Returns a copy of the optimizer, without the work that is done here."""
        copy = type(self._optimizer).from_config(self._optimizer.get_config())
        copy.loss_scale_factor = None
        if self._clips:
            copy.clipnorm = copy.global_clipnorm = None
        return copy

    def _held(self) -> list[HeldRows]:
        """Describes the variables."""
        held = []
        for variable, path in zip(self._variables, self._model.paths, strict=True):
            constraint = None if variable.constraint is None else keras.constraints.serialize(variable.constraint)
            if not isinstance(constraint, (dict, type(None))):
                raise ValueError(f"the constraint of {variable.path} cannot be sent to parameter servers: {constraint}")
            rows = variable.shape[0] if len(variable.shape) else 1
            held.append(HeldRows(path, 0, rows, rows, optimizers.decays(self._optimizer, variable), constraint))
        return held

    def _state(self) -> TrainingState:
        """Returns values and the optimizer's variables as this worker has them."""
        slots, scalars = self._of_optimizer()
        of_variables: list[dict[str, np.ndarray]] = [{} for _ in self._variables]
        for slot in slots:
            of_variables[slot.variable][slot.name] = array_of(slot.value)
        return TrainingState(
            [array_of(variable) for variable in self._variables],
            of_variables,
            {name: array_of(variable) for name, variable in scalars.items()},
        )

    def _of_optimizer(self) -> tuple[list[slots_of.Slot], dict[str, Any]]:
        variables = optimizers.variables_of(self._optimizer)
        slots = slots_of.slots_of_built(self._optimizer, variables)
        places = {id(variable): place for place, variable in enumerate(self._variables)}
        placed = [
            slots_of.Slot(places[id(variables[slot.variable])], slot.name, slot.value)
            for slot in slots
            if id(variables[slot.variable]) in places
        ]
        return placed, slots_of.scalars_of(self._optimizer, slots)

    def _assign(self, vectors: Vectors) -> None:
        self._assign_arrays(self._session.whole(vectors))
        value_of(optimizers.apply_count(self._optimizer)).assign(np.int64(self._session.iterations))

    def _assign_arrays(self, arrays: Sequence[np.ndarray]) -> None:
        """Assigns values that the servers have."""
        self._take(arrays)
        self._read = lambda: arrays

    def _take(self, arrays: Sequence[np.ndarray]) -> None:
        """Assigns values, without the note that Keras's own ``assign`` gives of them; see `assigned`."""
        for variable, value in zip(self._variables, arrays, strict=True):
            value_of(variable).assign(value)

    def _prepared(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns gradients as they are sent: unscaled, and clipped if that is done here."""
        given = [
            gradient if isinstance(gradient, (tf.IndexedSlices, type(None))) else tf.convert_to_tensor(gradient)
            for gradient in gradients
        ]
        if self._optimizer.loss_scale_factor is not None:
            factor = 1 / self._optimizer.loss_scale_factor
            given = [None if gradient is None else tf.math.scalar_mul(factor, gradient) for gradient in given]
        if self._clips and (self._optimizer.clipnorm or self._optimizer.global_clipnorm):
            given = optimizers.clipped(self._optimizer, given)
        return given


def array_of(variable: Any) -> np.ndarray:
    """Returns a copy of a Keras variable's value."""
    return to_array(variable.value.read_value())
