"""Abilities of strategies, which the seams of Keras and TensorFlow require.

A strategy's `extended` (a `tf.distribute.StrategyExtended`) inherits its abilities beside the TensorFlow class that it
extends. If it lacks an ability, the seams that require it do what Keras does:

| ability | what requires it |
|---|---|
| any | saving, callbacks that write, the progress bar, `compile` in the model's scope, `DynamicEmbedding`, errors |
| `DataParallel` | data, steps, losses, gradients, metrics, layers' state, loading, the end of epochs, equal weights |
| `UpdatesOnServers` | optimizers, whose updates are made by parameter servers; `evaluate`, `predict` and saving |
| `DelaysUpdates` | optimizers, `evaluate`, the end of epochs: updates are a step late |
| `TrainsInRounds` | optimizers, whose weights are exchanged after some steps; the end of epochs, `evaluate` |
| `ComesAndGoes` | the beginning and end of `fit`, the end of epochs: others may have begun and ended before |
| `HasStages` | steps of `fit`, `evaluate` and `predict`, weights, optimizers: a process holds a part of the model |

`TrainsInRounds` and `ComesAndGoes`, which are `DataParallel` as well, are in `round_abilities.py`.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.strategies.step_calls import StepCalls

if TYPE_CHECKING:
    from collections import Counter

    import tensorflow as tf

    from tfdist.compression.compressor import Compressor
    from tfdist.engine.bridge import Bridge
    from tfdist.engine.exchange import Exchange
    from tfdist.engine.group import Group
    from tfdist.parameter_server.dealing.bringing import Stream
    from tfdist.parameter_server.dealing.epochs import SharedEpochs
    from tfdist.parameter_server.dealing.plan import Plan
    from tfdist.parameter_server.tables.client import Form, TableClient
    from tfdist.parameter_server.tables.row_cache import CachePolicy
    from tfdist.strategies.all_reduce.delayed_sums import DelayedSums
    from tfdist.strategies.data.shares import Shares
    from tfdist.strategies.keras.gradient_norms import GradientNorms
    from tfdist.strategies.servers.server_link import Link
    from tfdist.strategies.stopping import Stopping


class Ability:
    """The base of all abilities, and of every tfdist strategy."""

    if TYPE_CHECKING:  # members of TensorFlow's class that the seams use

        @property
        def worker_devices(self) -> Any:
            """See `tf.distribute.StrategyExtended`."""

        @property
        def _num_replicas_in_sync(self) -> Any: ...

        def _container_strategy(self) -> Any: ...

        def _get_replica_id_in_sync_group(self, local: int) -> Any: ...

    @property
    def has_several_replicas(self) -> bool:
        """Whether there is more than one replica."""
        return self._num_replicas_in_sync > 1

    @property
    def calls_host_in_steps(self) -> bool:
        """Whether a step of training calls functions on the host, which XLA cannot compile."""
        return self.has_several_replicas

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this process's communication, or None."""
        return None

    def holds(self, model: Any, variable: Any) -> bool:
        """Whether this process has a variable of a model.

        Args:
            model: a Keras model.
            variable: of it, of its metrics or its optimizer.
        """
        return True

    @property
    def is_writer(self) -> bool:
        """Whether this process is the one that writes files and shows progress."""
        return True

    @property
    def saves_with_the_writer(self) -> bool:
        """Whether each process takes part when the writer saves a model: it gives weights, or saves what is its own."""
        return False

    @contextlib.contextmanager
    def local_only(self) -> Iterator[None]:
        """Context for what the writer does alone: nothing inside waits for other processes."""
        yield

    def by_the_writer(self, model: Any, action: Callable[[], Any]) -> Any:
        """Has the writer do what needs all variables of a model; other processes take part as far as they must.

        Args:
            model: a Keras model.
            action: what is done.

        Returns:
            What the action returns; None on other processes.
        """
        if not self.is_writer:
            return None
        with self.local_only():
            return action()

    def table(self, name: str, form: Form, cache: CachePolicy | None = None) -> TableClient | None:
        """A new table of an embedding's rows on the parameter servers; other workers get it by the same calls.

        Args:
            name: of a layer.
            form: of the table.
            cache: which rows this worker keeps; None for none.

        Returns:
            None in a job without servers.

        Raises:
            ValueError: this strategy cannot train rows.
            TfdistError: a server cannot be reached.
        """
        return None


class DataParallel(Ability, abc.ABC):
    """Replicas, in one process or several, that train on their shares of the global batch, each on a copy of the model.

    All processes call the same collectives. Gradients are summed over all replicas before any other processing, weighed
    by samples under `fit`, so that the sum is a mean. Results of metrics and logs cover all replicas, and layers' state
    is made equal on them after each Keras step and before `evaluate`. One process reads files for all.

    Attributes:
        group: the processes that are replicas of each other.
        bridge: reduces tensors over the group.
        exchange: broadcasts and gathers tensors in the group.
        stopping: whether a process wishes to end the steps of an epoch.
        step_calls: what processes tell each other in the steps of the method of Keras that is under way.
        shares: the number of samples of each replica in the current step.
        compressor: compresses gradients; None for no compression.
        norms: measures the noise of gradients in steps that are traced, or run eagerly, while it is there.
        checks_weights: whether the weights of all processes are compared after each epoch.
        meets_in_steps: whether the processes of the group take each step together. If not, metrics and layers' state
            are merged when they have all taken their steps.
        acts_alike: whether all processes call the same methods with the same arguments, and end epochs together.
        averaging_processes: how many processes take steps on their own, and average what each has learned.
        reader: this process's number among several that each read all data; their random numbers differ by it.
        is_reading_for_all: whether the caller is inside `reading_for_all`.
    """

    group: Group
    bridge: Bridge
    exchange: Exchange
    stopping: Stopping
    step_calls = StepCalls()
    shares: Shares
    compressor: Compressor | None = None
    norms: GradientNorms | None = None
    checks_weights: bool
    meets_in_steps = True
    acts_alike = True
    averaging_processes = 1
    reader = 0
    is_reading_for_all = False

    @property
    def in_steps(self) -> Bridge:
        """Reduces tensors within Keras steps, over the processes that take each step together."""
        return self.bridge

    @property
    def everyone(self) -> Exchange:
        """Broadcasts and gathers tensors among all processes, which are more where a replica is on several."""
        return self.exchange

    @property
    def is_local_only(self) -> bool:
        """Whether the caller is inside `local_only`, and must not call collectives."""
        return False

    def of_each(self, model: Any) -> list[Any]:
        """The variables of a model's optimizer, of which each process has values of its own.

        Args:
            model: a Keras model.
        """
        return []

    @abc.abstractmethod
    def count(self, optionals: list[Any]) -> tf.Tensor:
        """Counts the replicas of all processes that have another batch; records the step's samples in `shares`.

        Args:
            optionals: the local replicas' next batches, each a `tf.experimental.Optional`.

        Returns:
            An int64 scalar, the same on all processes.
        """

    @abc.abstractmethod
    def reading_for_keras(self, calls: StepCalls) -> contextlib.AbstractContextManager[None]:
        """Context in which distributed datasets yield a `Share`, with a stand-in row where there are no samples.

        Args:
            calls: what processes tell each other in the steps that read them.
        """

    @abc.abstractmethod
    def reading_in_order(self) -> contextlib.AbstractContextManager[None]:
        """Context in which all processes read the same batches of a dataset; gathered outputs keep its order."""

    @contextlib.contextmanager
    def reading_for_all(self) -> Iterator[None]:
        """Context in which the caller broadcasts the weights that are loaded."""
        self.is_reading_for_all = True
        try:
            yield
        finally:
            self.is_reading_for_all = False

    def await_file(self, path: Any) -> None:
        """Waits a little for a file that the writer may be about to write, where others do not know that it has.

        Args:
            path: of the file.
        """


class DelaysUpdates(DataParallel):
    """Gradients are summed while the next step computes, and are used after it."""

    calls_host_in_steps = True

    @abc.abstractmethod
    def delayed_sums(self, optimizer: Any, variables: list[Any]) -> DelayedSums:
        """The sums of an optimizer.

        Args:
            optimizer: a Keras optimizer.
            variables: that it has gradients of.

        Raises:
            ValueError: it had gradients of other variables before.
        """

    @abc.abstractmethod
    def delayed_of(self, model: Any) -> list[tuple[Any, DelayedSums]]:
        """The optimizers that have updated variables of a model, and their sums.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def staleness(self, model: Any) -> Counter[int]:
        """By how many updates weights had changed between a gradient's computation and its use, and how often.

        Args:
            model: a Keras model.
        """


class UpdatesOnServers(Ability, abc.ABC):
    """Keras optimizers send their gradients to parameter servers, which hold the optimizers' state.

    Attributes:
        worker: number of this task.
        shares_data: whether the batches of `fit` are dealt out to all workers.
        is_sharing: whether a call of `fit` reads batches that are dealt.
        workers_wait: whether workers wait for each other.
        bound: of `BoundedStaleness`; None in other modes.
        observes: whether this task is an evaluator, which reads and does not train.
        over: of an evaluator, set when no task is left that trains.
        reported: what has been logged, and is not again: why data were not shared, which methods write nothing.
    """

    worker: int
    shares_data = False
    is_sharing = False
    calls_host_in_steps = True
    workers_wait = False
    bound: int | None = None
    observes = False
    over: threading.Event
    reported: set[str]

    @abc.abstractmethod
    def update_on_servers(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        samples: Any,
        apply: Callable[[], None],
        ticket: Any = None,
    ) -> None:
        """Makes one update, and gives the variables their new values; in the graph under construction, or eagerly.

        Args:
            optimizer: a Keras optimizer.
            gradients: tensors, `tf.IndexedSlices` or None.
            variables: Keras variables.
            samples: how many the gradients are a mean of; a number or a scalar tensor.
            apply: makes the update here, as Keras does.
            ticket: of their batch, an int64 scalar; None if nobody dealt it.
        """

    @abc.abstractmethod
    def links(self, model: Any) -> list[Link]:
        """The links to servers of those optimizers that have updated variables of a model.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def shared_epochs(
        self, plan: Plan, within_batches: bool, when_idle: Callable[[], None], stream: Stream | None = None
    ) -> contextlib.AbstractContextManager[SharedEpochs]:
        """Context in which this worker takes part in epochs whose batches are dealt to all workers.

        Args:
            plan: as of `SharedEpochs`.
            within_batches: as of `SharedEpochs`.
            when_idle: as of `SharedEpochs`.
            stream: as of `SharedEpochs`; read on the chief only.
        """

    @abc.abstractmethod
    def begin_epoch(self, model: Any) -> None:
        """Makes this worker's non-trainable weights the chief's before the first epoch; the chief gives its own.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def version(self, model: Any, reads: bool = True) -> int:
        """The number of updates that a model's parameters contain.

        Args:
            model: a Keras model.
            reads: whether the newest parameters are read first.
        """

    @abc.abstractmethod
    def link_of(self, optimizer: Any) -> Link | None:
        """The link of an optimizer, if it has updated variables.

        Args:
            optimizer: a Keras optimizer.
        """


class HasStages(DataParallel):
    """A model's variables and calls are divided into stages, of which this process may have some only.

    Attributes:
        over_stages: reduces tensors over the processes that have the stages of a model.
    """

    calls_host_in_steps = True
    over_stages: Bridge

    @abc.abstractmethod
    def place(self, model: Any) -> None:
        """Divides a model, and allocates what this process holds of it.

        Args:
            model: a Keras model that is built.

        Raises:
            ValueError: it cannot be divided.
        """

    @abc.abstractmethod
    def check_batches(self, x: Any, batch_size: int | None) -> None:
        """Checks that stages can divide the batches of a training.

        Args:
            x: as of ``fit``.
            batch_size: as of ``fit``.

        Raises:
            ValueError: they cannot.
        """

    @abc.abstractmethod
    def steps_of(self, model: Any) -> Any:
        """The `tfdist.pipeline.model_steps.ModelSteps` of a model, which is placed.

        Args:
            model: as of `place`.
        """

    @abc.abstractmethod
    def equalize(self, model: Any) -> None:
        """Gives all processes that hold a variable the value of the first of them; called by all.

        Args:
            model: as of `place`.
        """

    @abc.abstractmethod
    def values(self, model: Any, variables: Sequence[Any]) -> list[Any]:
        """The values of variables, as arrays, wherever they are; called by all.

        Args:
            model: as of `place`.
            variables: of the model, or of its optimizer.
        """
