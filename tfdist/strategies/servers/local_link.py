"""Links of a worker's own Keras optimizer to the parameter servers: they exchange the changes that its steps make."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import msgspec
import numpy as np
import tensorflow as tf

from tfdist.engine.host_calls import host_call
from tfdist.errors import TfdistError
from tfdist.local_sgd import rules
from tfdist.parameter_server.options.pushes import ElasticAveraging, LocalSteps
from tfdist.parameter_server.protocol.gradients import Kind, PushedGradients
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.worker.session import Vectors
from tfdist.strategies.servers.server_link import Attachment, Link, array_of
from tfdist.strategies.servers.server_vectors import PushAnswerLayout, kinds_of, tensors_for_server


class LocalLink(Link):
    """Link of an optimizer that updates its variables here, and pushes the changes to the servers.

    The servers add what is pushed: their optimizer is SGD with the learning rate 1, for which an update u is the
    gradient −u.

    Args:
        attachment: how this task attaches them.
        optimizer: the Keras optimizer, built.
        variables: the Keras variables.
        pushes: what is exchanged, and when.
    """

    def __init__(
        self, attachment: Attachment, optimizer: Any, variables: Sequence[Any], pushes: LocalSteps | ElasticAveraging
    ) -> None:
        self._pushes = pushes
        self._pending = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._samples = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self._base: Vectors = []
        super().__init__(attachment, optimizer, variables)

    def update(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        samples: Any = 1.0,
        apply: Callable[[], None] = lambda: None,
        ticket: Any = None,
    ) -> None:
        """Makes an update here, and exchanges the changes if it is time; see `Link.update`."""
        self._placed(gradients, variables)  # raises its errors
        if not tf.executing_eagerly():
            super().suspend()
        apply()
        weight = tf.cast(samples, tf.float64)
        with tf.control_dependencies([weight]):  # Keras runs once more what does not depend on a batch
            pending = self._pending.assign_add(1)
            self._samples.assign_add(weight)
        if self._pushes.steps == 1:
            self._exchange()
        else:
            tf.cond(pending >= self._pushes.steps, self._exchange, lambda: tf.constant(0))

    def refresh(self) -> None:
        """Pushes pending changes, and reads the newest values."""
        self._flush()
        super().refresh()

    def suspend(self, is_end: bool = False) -> None:
        """Pushes pending changes; see `Link.suspend`."""
        self._flush()
        super().suspend(is_end)

    def fetch(self) -> None:
        """Assigns the newest values; slots stay this worker's."""
        self.refresh()

    def close(self) -> None:
        """Pushes pending changes, and leaves the servers."""
        try:
            with contextlib.suppress(TfdistError, tf.errors.OpError):
                self._flush()
        finally:
            super().close()

    @property
    def averages_here(self) -> bool:
        """True: moving averages are kept by this worker's optimizer."""
        return True

    def _flush(self) -> None:
        with tf.init_scope():
            if int(self._pending) and self.failure is None:
                self._exchange()

    def _exchange(self) -> tf.Tensor:
        """Exchanges the changes; in the graph under construction, or eagerly."""
        values = [variable.value for variable in self._variables]
        given = [tensors_for_server(server, values, self._model) for server in range(len(self._model.shapes))]

        def on_host(samples: np.ndarray, *changed: np.ndarray) -> list[np.ndarray]:
            rest = iter(changed)
            arrays = [[next(rest) for _ in tensors] for tensors in given]
            vectors = self._exchanged(arrays, float(samples))
            return list(itertools.chain.from_iterable(vectors))

        inputs = [self._samples.read_value(), *(tensor for shard in given for tensor in shard)]
        answered = PushAnswerLayout(kinds_of(values, self._model), self._model)
        vectors = host_call(on_host, inputs, answered.specs, name="tfdist_servers")
        answered.assign_to(self._variables, vectors)
        self._pending.assign(0)
        self._samples.assign(0.0)
        return tf.constant(0)

    def _exchanged(self, vectors: Vectors, samples: float) -> Vectors:
        """Pushes the changes since the last exchange, and returns the variables' new values."""
        self._base = self._step(self._pushed(_each(np.subtract, self._base, vectors)), samples, None)
        return self._base

    def _pushed(self, vectors: Vectors) -> list[PushedGradients]:
        """Returns vectors in the form of dense gradients."""
        dense: Kind = "dense"
        return [
            PushedGradients((dense,) * len(shapes.shapes), shard)
            for shapes, shard in zip(self._model.shapes, vectors, strict=True)
        ]

    def _assign(self, vectors: Vectors) -> None:
        self._base = vectors
        self._assign_arrays(self._session.whole(vectors))

    def _keep(self, arrays: Sequence[np.ndarray]) -> None:
        super()._keep(arrays)
        self._base = self._session.parts(arrays)

    def _name(self) -> str:
        return f"{super()._name()}-{type(self._pushes).__name__}"

    def _options(self) -> list[str]:
        return []  # each worker's own optimizer makes the updates

    def _optimizer_on_servers(self) -> Any:
        return keras.optimizers.SGD(1.0)

    def _held(self) -> list[HeldRows]:
        """Describes the variables without constraints and weight decay, which are the worker's."""
        return [msgspec.structs.replace(held, constraint=None, decays=False) for held in super()._held()]

    def _state(self) -> TrainingState:
        return TrainingState([array_of(variable) for variable in self._variables])


class ElasticLink(LocalLink):
    """Link of an optimizer whose workers' copies of the variables and the servers' copy attract each other.

    Args:
        attachment: how this task attaches them.
        optimizer: the Keras optimizer, built.
        variables: the Keras variables.
        pushes: how often the copies move.
        rate: how far they move, as a part of their distance.
    """

    def __init__(
        self,
        attachment: Attachment,
        optimizer: Any,
        variables: Sequence[Any],
        pushes: ElasticAveraging,
        rate: float,
    ) -> None:
        self._rate = rate
        super().__init__(attachment, optimizer, variables, pushes)

    def refresh(self) -> None:
        """Gives the servers what the chief's program has assigned; this worker's copy stays its own."""
        with self._lock:
            if not int(self._pending):
                self._put_assigned()

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """Context in which the variables have the servers' values."""
        self.suspend()
        self.refresh()
        saved = [array_of(variable) for variable in self._variables]
        with self._lock:
            center = self._session.whole(self._session.pull())
        try:
            self._assign_arrays(center)
            yield
        finally:
            self._assign_arrays(saved)

    def fetch(self) -> None:
        """Assigns the servers' values."""
        with self._lock:
            self._assign_arrays(self._session.whole(self._session.pull()))

    newest_state = newest

    def _flush(self) -> None:
        """Pushes nothing: this worker's copy moves only when it is time."""

    def _exchanged(self, vectors: Vectors, samples: float) -> Vectors:
        with self._lock, self._failing():
            center = self._session.pull()
        moved = _each(lambda mine, its: rules.pulled(mine, its, self._rate), vectors, center)
        self._step(self._pushed(_each(np.subtract, moved, vectors)), samples, None)
        arrays = self._session.whole(moved)
        self._read = lambda: arrays
        return moved


def _each(function: Callable[[Any, Any], Any], vectors: Vectors, other: Vectors) -> Vectors:
    """Applies a function to the vectors at the same places."""
    return [
        [function(mine, its) for mine, its in zip(mine, its, strict=True)]
        for mine, its in zip(vectors, other, strict=True)
    ]
