"""Abilities of strategies, which the seams of Keras and TensorFlow require.

A strategy's `extended` (a `tf.distribute.StrategyExtended`) inherits its abilities beside the TensorFlow class that it
extends. If it lacks an ability, the seams that require the ability do what Keras does:

| ability | seams that require it |
|---|---|
| any | saving, callbacks that write, the progress bar, `compile` in the model's scope, `DynamicEmbedding`, errors |
| `DataParallel` | data, steps, losses, gradients, metrics, layers' state, loading, the end of epochs, equal weights |
| `UpdatesOnServers` | optimizers, whose updates are made by parameter servers; `evaluate`, `predict` and saving |
| `DelaysUpdates` | optimizers, `evaluate`, the end of epochs: updates are a step late |
| `TrainsInRounds` | optimizers, whose weights are exchanged after some steps; the end of epochs, `evaluate` |
| `ElasticMembership` | the beginning and end of `fit` and of epochs, which processes may reach at different times |
| `DividesUpdates` | optimizers, whose variables are on several processes; loading |
| `DealsVariables` | optimizers: each process updates the variables that are dealt to it; `compile`, loading |
| `KeepsParts` | layers, which gather their weights when they are called, or compute with parts of them; new weights |
| `HasStages` | steps of `fit`, `evaluate` and `predict`, weights, optimizers: a process holds a part of the model |

Those of servers, of rounds, and of variables in parts are in `server_abilities.py`, `round_abilities.py` and
`divided_abilities.py`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tfdist.strategies.step_calls import StepCalls

if TYPE_CHECKING:
    from collections import Counter

    import tensorflow as tf

    from tfdist.compression.compressor import Compressor
    from tfdist.engine.bridge import Bridge
    from tfdist.engine.exchange import Exchange
    from tfdist.engine.group import ProcessGroup
    from tfdist.parameter_server.tables.client import TableClient, TableSpec
    from tfdist.parameter_server.tables.row_cache import CachePolicy
    from tfdist.strategies.all_reduce.delayed_sums import DelayedSums
    from tfdist.strategies.data.shares import Shares
    from tfdist.strategies.keras.gradient_norms import GradientNorms
    from tfdist.strategies.stopping import Stopping


class Ability:
    """The base of all abilities, and of every tfdist strategy."""

    if TYPE_CHECKING:  # members of TensorFlow's class that the seams use

        @property
        def worker_devices(self) -> Any:
            """The devices of this process's replicas; see `tf.distribute.StrategyExtended`."""

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

    def assigned(self, variable: Any) -> None:
        """Notes that a user's program has assigned a value to a variable outside of steps.

        Args:
            variable: a Keras variable.
        """
        return

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this process's communication, or None."""
        return None

    def cause_of(self, error: tf.errors.OpError) -> BaseException | None:
        """Returns the error of tfdist that an error of TensorFlow has come from, or None.

        Args:
            error: an error of a graph's operation.
        """
        return self.failure

    def holds(self, model: Any, variable: Any) -> bool:
        """Returns whether this process holds a variable of a model.

        Args:
            model: a Keras model.
            variable: a variable of the model, of its metrics or of its optimizer.
        """
        return True

    @property
    def is_writer(self) -> bool:
        """Whether this process is the writer, which writes files and shows progress."""
        return True

    @property
    def takes_part_in_saving(self) -> bool:
        """Whether each process takes part when the writer saves a model: it sends weights, or saves residuals."""
        return False

    @contextlib.contextmanager
    def local_only(self) -> Iterator[None]:
        """Context for work of the writer alone: nothing inside waits for other processes."""
        yield

    def run_on_writer(self, model: Any, action: Callable[[], Any]) -> Any:
        """Has the writer do work that needs all variables of a model; other processes only help where they must.

        Args:
            model: a Keras model.
            action: function that does the work.

        Returns:
            The result of the action; None on other processes.
        """
        if not self.is_writer:
            return None
        with self.local_only():
            return action()

    def table(self, name: str, form: TableSpec, cache: CachePolicy | None = None) -> TableClient | None:
        """Returns a table of an embedding's rows on the parameter servers; the same call on all workers shares it.

        Args:
            name: name of the embedding layer.
            form: columns, initial values and row policy of the table, equal on all workers.
            cache: which rows this worker keeps between steps; None keeps no rows.

        Returns:
            A client of the table; None in a job without servers.

        Raises:
            ValueError: this strategy cannot train rows.
            TfdistError: a server cannot be reached.
        """
        return None


class DataParallel(Ability, abc.ABC):
    """A strategy whose replicas, in one process or several, train copies of the model on shares of the global batch.

    All processes call the same collectives. Gradients are summed over all replicas before any other processing. Under
    `fit` they are weighted by samples, so that the sum is a mean. Results of metrics and logs cover all replicas, and
    layers' state is made equal on them after each Keras step and before `evaluate`. One process reads files for all.

    Attributes:
        group: the processes that are replicas of each other.
        bridge: reduces tensors over the group.
        exchange: broadcasts and gathers tensors in the group.
        stopping: requests to end the steps of an epoch early.
        step_calls: collectives of each step of the Keras method that is running.
        shares: the number of samples of each replica in the current step.
        compressor: compressor of gradients; None sends full precision.
        norms: measures the noise of gradients in steps that are traced, or run eagerly, while it is set; None measures
            nothing.
        float32_sums: whether gradients of half precision are summed in float32.
        checks_weights: whether the weights of all processes are compared after each epoch.
        synchronizes_steps: whether the processes of the group take each step together. If not, metrics and layers'
            state are merged when all have taken their steps.
        runs_in_lockstep: whether all processes call the same methods with the same arguments, and end epochs together.
        averaging_processes: number of processes that take steps on their own and average their weights; 1 if processes
            sum gradients instead.
        reader: number of this process among those that each read all data; seeds its random numbers.
        broadcasts_loaded_weights: whether the caller is inside `reading_for_all`.
    """

    group: ProcessGroup
    bridge: Bridge
    exchange: Exchange
    stopping: Stopping
    step_calls = StepCalls()
    shares: Shares
    compressor: Compressor | None = None
    norms: GradientNorms | None = None
    float32_sums = False
    checks_weights: bool
    synchronizes_steps = True
    runs_in_lockstep = True
    averaging_processes = 1
    reader = 0
    broadcasts_loaded_weights = False

    @property
    def step_bridge(self) -> Bridge:
        """The bridge that reduces tensors within Keras steps, over the processes that take each step together."""
        return self.bridge

    @property
    def all_processes(self) -> Exchange:
        """The exchange among all processes: more than the group where one replica spans several processes."""
        return self.exchange

    @property
    def is_local_only(self) -> bool:
        """Whether the caller is inside `local_only`, and must not call collectives."""
        return False

    def per_process_variables(self, model: Any) -> list[Any]:
        """Returns the variables of a model's optimizers whose values differ between processes.

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
            The number of replicas, an int64 scalar, the same on all processes.
        """

    @abc.abstractmethod
    def reading_for_keras(self, calls: StepCalls) -> contextlib.AbstractContextManager[None]:
        """Context in which distributed datasets yield a `Share`, with a stand-in row where there are no samples.

        Args:
            calls: collectives of the steps that read the datasets.
        """

    @abc.abstractmethod
    def reading_in_order(self) -> contextlib.AbstractContextManager[None]:
        """Context in which all processes read the same batches of a dataset; gathered outputs keep its order."""

    @contextlib.contextmanager
    def reading_for_all(self) -> Iterator[None]:
        """Context in which the caller broadcasts the weights that are loaded."""
        self.broadcasts_loaded_weights = True
        try:
            yield
        finally:
            self.broadcasts_loaded_weights = False

    def await_file(self, path: Any) -> None:
        """Waits a little for a file that the writer may not have finished, where processes do not wait for each other.

        Args:
            path: path of the file.
        """


class DelaysUpdates(DataParallel):
    """A strategy that sums gradients while the next step computes, and uses the sums after that step."""

    calls_host_in_steps = True

    @abc.abstractmethod
    def delayed_sums(self, optimizer: Any, variables: list[Any]) -> DelayedSums:
        """Returns the delayed sums of an optimizer.

        Args:
            optimizer: a Keras optimizer.
            variables: variables that the optimizer has gradients of, in their order.

        Raises:
            ValueError: the optimizer had gradients of other variables before.
        """

    @abc.abstractmethod
    def delayed_of(self, model: Any) -> list[tuple[Any, DelayedSums]]:
        """Returns the optimizers that have updated variables of a model, and their delayed sums.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def staleness(self, model: Any) -> Counter[int]:
        """Returns how often each staleness occurred: the updates between a gradient's computation and its use.

        Args:
            model: a Keras model.
        """
