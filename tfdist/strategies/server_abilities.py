"""The ability of strategies whose variables are updated on parameter servers."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfdist.strategies.abilities import Ability

if TYPE_CHECKING:
    from tfdist.parameter_server.dealing.epochs import SharedEpochs
    from tfdist.parameter_server.dealing.plan import Plan
    from tfdist.parameter_server.dealing.stream_reader import Stream
    from tfdist.strategies.servers.server_link import Link


class UpdatesOnServers(Ability, abc.ABC):
    """A strategy whose optimizers send gradients to parameter servers, which hold the optimizers' state.

    Attributes:
        worker: number of this task.
        shares_data: whether the batches of `fit` are dealt out to all workers.
        is_sharing: whether the call of `fit` under way reads batches that are dealt out.
        workers_wait: whether workers wait for each other.
        bound: largest staleness in the mode `BoundedStaleness`, in steps; None in other modes.
        observes: whether this task is an evaluator, which reads weights and does not train.
        over: event that an evaluator waits for: no task is left that trains.
        reported: messages that have been logged and are not repeated, and methods that write nothing, by name.
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
            gradients: gradient of each variable: a tensor, `tf.IndexedSlices` or None.
            variables: Keras variables, in the order of the gradients.
            samples: number of samples that the gradients are a mean of; a number or a scalar tensor.
            apply: function that makes the update in this process, as Keras does.
            ticket: ticket that the batch was dealt with, an int64 scalar; None for batches that were not dealt.
        """

    @abc.abstractmethod
    def links(self, model: Any) -> list[Link]:
        """Returns the links to servers of the optimizers that have updated variables of a model.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def shared_epochs(
        self, plan: Plan, when_idle: Callable[[], None], stream: Stream | None = None
    ) -> contextlib.AbstractContextManager[SharedEpochs]:
        """Context in which this worker takes part in epochs whose batches are dealt to all workers.

        Args:
            plan: how the samples of each epoch are divided into batches.
            when_idle: function that tells all servers not to wait for this worker.
            stream: source of batches that the chief reads and sends to all workers; None if each reads its own.
        """

    @abc.abstractmethod
    def begin_epoch(self, model: Any) -> None:
        """Copies the chief's non-trainable weights to this worker before the first epoch; the chief sends its own.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def begin_eager_steps(self, model: Any) -> None:
        """Attaches a model's optimizer to the servers before an eager step, if it is the only one and is built.

        So the first gradients of a worker are those of the chief's values. A graph attaches when it is traced; other
        eager models attach in their first step, with gradients of the worker's own values.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def version(self, model: Any, reads: bool = True) -> int:
        """Returns the number of updates that a model's parameters contain.

        Args:
            model: a Keras model.
            reads: whether the newest parameters are read from the servers first.
        """

    @abc.abstractmethod
    def link_of(self, optimizer: Any) -> Link | None:
        """Returns the link of an optimizer to its servers; None if the optimizer has made no update.

        Args:
            optimizer: a Keras optimizer.
        """
