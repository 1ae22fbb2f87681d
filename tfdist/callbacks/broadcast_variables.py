"""A callback that makes training begin with equal weights."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks.processes import has_others, processes_of
from tfdist.engine.exchange import Exchange
from tfdist.errors import MismatchError
from tfdist.optimizers import keras_optimizers
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras.keras_optimizers import accumulators, innermost


class BroadcastVariables(keras.callbacks.Callback):
    """Sends one process's weights, and its optimizer's variables, to all processes before the first batch.

    For `tfdist.DistributedOptimizer` and other training without a strategy; strategies keep weights equal themselves.
    Variables that are made later are sent after the first batch, or before the next epoch. If only the root has loaded
    a model with its optimizer, the other processes build theirs. Variables that each process has for itself are not
    sent: gradients that the optimizer accumulates, and variables that ``register_local_var`` names.

    Args:
        root_rank: rank of the process whose values are sent, among the processes that train the model.

    Raises:
        ValueError: ``root_rank`` is out of range.
        MismatchError: a process has other variables than the root.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self._root = root_rank
        self._sent: set[int] = set()
        self._has_begun = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the callback, and checks the root's rank."""
        self._sent, self._has_begun = set(), False
        size = processes_of(self.model).size
        if not 0 <= self._root < size:
            raise ValueError(f"BroadcastVariables takes a root_rank from 0 to {size - 1}; got {self._root}")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sends the variables that have not been sent yet."""
        self._send()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sends variables that the first batch has made."""
        if not self._has_begun:
            self._has_begun = True
            self._send()

    def _send(self) -> None:
        if not has_others(self) or current_strategy.of_model(self.model, DataParallel) is not None:
            return
        exchange = Exchange(processes_of(self.model))
        self._build_alike(exchange)
        everything = [*self.model.variables, *self.model.optimizer.variables]
        left_out = self._sent | {id(variable) for variable in _local_variables(self.model.optimizer, everything)}
        new = [variable for variable in everything if id(variable) not in left_out]
        kinds = ", ".join(f"{_kind(variable)} {variable.dtype} {tuple(variable.shape)}" for variable in new)
        everyone = [encoded.decode() for encoded in exchange.all_gather(tf.constant([kinds])).numpy()]
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[self._root]:
                raise MismatchError(
                    f"BroadcastVariables: rank {rank} has other variables than rank {self._root}, which has "
                    f"{everyone[self._root] or 'none'}; rank {rank} has {theirs or 'none'}. Make the same model and "
                    "the same optimizer on every process."
                )
        for variable in new:
            variable.assign(exchange.broadcast(tf.convert_to_tensor(variable.value), self._root))
        self._sent.update(map(id, new))

    def _build_alike(self, exchange: Exchange) -> None:
        """Builds the optimizer if the root's is built, as when the root alone has loaded a model with its optimizer."""
        optimizer = self.model.optimizer
        built = exchange.all_gather(tf.constant([int(optimizer.built)])).numpy()
        if built[self._root] and not optimizer.built and self.model.built:
            optimizer.build(self.model.trainable_variables)


def _kind(variable: Any) -> str:
    """Returns the kind of a variable, such as kernel or velocity.

    Names of slots also contain names of layers, which may differ between processes: layers may be numbered otherwise,
    or one process may have loaded the model.
    """
    return str(variable.path.rpartition("/")[2].rpartition("_")[2])


def _local_variables(optimizer: Any, variables: list[Any]) -> list[Any]:
    """Returns the variables that differ between processes on purpose."""
    gradients = keras_optimizers.gradients_of(innermost(optimizer))
    local = [] if gradients is None else [variable for variable in variables if gradients.is_local(variable)]
    slots = tuple(variable.path.replace("/", "_") + "_" for variable in local)  # Keras begins slots' names so
    of_local = [
        variable for variable in optimizer.variables if slots and variable.path.rpartition("/")[2].startswith(slots)
    ]
    return [*accumulators(optimizer), *local, *of_local]
