"""What a strategy can do: what the seams of Keras and TensorFlow ask for, each for no more than it needs.

The inner half of a strategy (a `tf.distribute.StrategyExtended`) inherits its abilities beside the class of
TensorFlow's that it extends. Where it lacks one, the seams that need it do what Keras does:

| ability | what rests on it |
|---|---|
| `SharesBatches` | data, shuffling, steps on shares, Dropout's seeds, `predict` and `predict_on_batch` |
| `ReducesGradients` | gradients are summed before clipping, and agreed to be finite; compression |
| both of them | gradients are weighed by samples, and losses left alone |
| `MergesMetrics` | results of metrics, and logs |
| `AveragesState` | what layers keep (moving statistics, counts), after each step and before `evaluate` |
| `WritesOnce` | saving, callbacks that write, the progress bar |
| `LoadsForAll` | ``load_weights``, `load_model`, `BackupAndRestore` |
| `EndsEpochsTogether` | ``stop_training``, and the comparison of weights |
| any | `compile` in the model's scope, and errors as they were before a graph wrapped them |
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.compression.compressor import Compressor
    from tfdist.engine.bridge import Bridge
    from tfdist.engine.exchange import Exchange
    from tfdist.engine.group import Group
    from tfdist.strategies.shares import Shares


class Ability:
    """What every strategy of tfdist is; the base of all abilities."""

    if TYPE_CHECKING:  # what the seams use of TensorFlow's own

        @property
        def worker_devices(self) -> Any:
            """See `tf.distribute.StrategyExtended`."""

        @property
        def _num_replicas_in_sync(self) -> Any: ...

        def _container_strategy(self) -> Any: ...

    @property
    def has_several_replicas(self) -> bool:
        """Whether there is anybody to train together with."""
        return self._num_replicas_in_sync > 1

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the communication of this process, if one has."""
        return None


class HasCollectives(Ability):
    """The base of the abilities for which all processes call the same collectives.

    Attributes:
        group: the processes.
        bridge: reduces tensors over them.
        exchange: broadcasts and gathers tensors.
    """

    group: Group
    bridge: Bridge
    exchange: Exchange

    @property
    def is_local_only(self) -> bool:
        """Whether the caller is inside of `WritesOnce.local_only`, and must call no collective."""
        return False


class SharesBatches(HasCollectives, abc.ABC):
    """Every replica trains on its share of the global batch, on a copy of the model's variables.

    Attributes:
        shares: how many samples each has in the current step.
    """

    shares: Shares

    @abc.abstractmethod
    def count(self, optionals: list[Any]) -> tf.Tensor:
        """How many replicas have another batch, over all processes; notes the samples of the step in `shares`.

        Args:
            optionals: the local replicas' next batches, of `tf.experimental.Optional`.

        Returns:
            An int64 scalar, the same on all processes.
        """

    @abc.abstractmethod
    def reading_for_keras(self) -> contextlib.AbstractContextManager[None]:
        """Datasets distributed inside yield a `Share`, with a row that stands in for samples where there are none."""

    @abc.abstractmethod
    def reading_in_order(self) -> contextlib.AbstractContextManager[None]:
        """Of datasets distributed inside all processes read the same batches: what is gathered is in their order."""


class ReducesGradients(HasCollectives):
    """Gradients of Keras's optimizers are summed over all replicas, before anything else is done to them.

    A strategy that also `SharesBatches` has them weighed by samples under `fit`, so that the sum is a mean.

    Attributes:
        reduces_gradients: whether they are in the step that is traced, or run eagerly. A boolean scalar tensor or
            `tf.Variable` is read in each step of a graph, on all replicas alike. Where it is false, every replica
            applies the gradient of its own share. It must not change between the steps of one gradient accumulation.
        compressor: knows the variables whose gradients are compressed; None where none are.
    """

    reduces_gradients: bool | tf.Tensor | tf.Variable = True
    compressor: Compressor | None = None


class MergesMetrics(HasCollectives):
    """Results of metrics and logs are of all replicas."""


class AveragesState(HasCollectives):
    """What layers keep is made equal on all replicas, after each step of Keras's and before `evaluate`."""


class WritesOnce(Ability, abc.ABC):
    """One process writes files and shows progress."""

    @property
    @abc.abstractmethod
    def is_writer(self) -> bool:
        """Whether this process is the one."""

    @contextlib.contextmanager
    def local_only(self) -> Iterator[None]:
        """Around what the writer does alone: nothing inside waits for other processes."""
        yield


class LoadsForAll(HasCollectives, WritesOnce):
    """One process reads weights and backups, and hands them to the others."""

    is_reading_for_all = False

    @contextlib.contextmanager
    def reading_for_all(self) -> Iterator[None]:
        """Weights that are loaded inside are handed on by the caller."""
        self.is_reading_for_all = True
        try:
            yield
        finally:
            self.is_reading_for_all = False


class EndsEpochsTogether(HasCollectives):
    """All processes stop after the same epoch.

    Attributes:
        checks_weights: whether their weights must be equal then.
    """

    checks_weights: bool
