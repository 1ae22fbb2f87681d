"""The `extended` of `AllReduceStrategy(shard="optimizer")`: each process keeps a part of the optimizers' variables."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.bridge import Bridge
from tfdist.engine.owned import Owned
from tfdist.private.optimizers import variables_of
from tfdist.strategies.abilities import DealsVariables
from tfdist.strategies.all_reduce import keras_sharded
from tfdist.strategies.all_reduce.extended import AllReduceExtended
from tfdist.strategies.divided.dealing import Dealing, contained
from tfdist.strategies.divided.described_variables import is_elsewhere
from tfdist.strategies.divided.remote_variables import RemoteVariables
from tfdist.strategies.keras import keras_variables

log = logging.getLogger("tfdist")


class ShardedExtended(AllReduceExtended, DealsVariables):
    """An `AllReduceExtended` with one device, whose processes each update the variables that are dealt to them."""

    more = ", shard='optimizer'"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        keras_sharded.install()
        self.over_updaters = Bridge(self.group)
        self.owned = Owned(self.group)
        self._dealings: weakref.WeakKeyDictionary[Any, Dealing] = weakref.WeakKeyDictionary()
        # Not of a model: ranks may have made other models before it, and name it otherwise.
        self._name = f"optimizers of sharded strategy {self.group.number('sharded strategy')}"

    # Dealing.

    def deal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Deals the variables of an optimizer; see `DealsVariables`."""
        if self.group.size == 1:
            return
        if len(variables) >= self.group.size:
            self._dealings[optimizer] = Dealing(variables, self.group.size, self.group.rank)
        elif self.is_writer:
            log.warning(
                "tfdist: shard='optimizer' deals whole variables, and the optimizer %s has %d for %d processes: each "
                "process updates all of them, and keeps all of the optimizer's variables.",
                optimizer.name,
                len(variables),
                self.group.size,
            )

    def dealing(self, optimizer: Any) -> Dealing | None:
        """Returns how the variables of an optimizer are dealt; see `DealsVariables`."""
        return self._dealings.get(optimizer)

    def ready(self, optimizer: Any) -> Dealing | None:
        """Returns how the variables of an optimizer are dealt, after allocating its own; see `DealsVariables`."""
        dealing = self._dealings.get(optimizer)
        if dealing is not None and optimizer.built:
            self._allocate(optimizer, dealing)
        return dealing

    def place(self, model: Any) -> None:
        """Allocates the variables that this process holds of a model's optimizers; see `DealsVariables`."""
        for optimizer in self._optimizers_of(model):
            self.ready(optimizer)

    def _allocate(self, optimizer: Any, dealing: Dealing) -> None:
        strategy = self._container_strategy()
        with self.local_only():  # another process holds other variables
            if tf.distribute.get_strategy() is strategy:
                dealing.place(optimizer)
            else:
                with strategy.scope():
                    dealing.place(optimizer)

    def _optimizers_of(self, model: Any) -> list[Any]:
        """Returns the optimizers of a model whose variables are dealt."""
        compiled = getattr(model, "optimizer", None)
        known = keras_variables.optimizers(model) + ([] if compiled is None else [compiled])
        return [optimizer for optimizer in contained(known) if optimizer in self._dealings]

    def _slots_of(self, model: Any) -> dict[int, tuple[Any, int]]:
        """Returns the optimizers' variables that one process holds, with its rank, by their `id`."""
        slots: dict[int, tuple[Any, int]] = {}
        for optimizer in self._optimizers_of(model):
            slots.update(self._dealings[optimizer].slots)
        return slots

    # Variables of other processes.

    def holds(self, model: Any, variable: Any) -> bool:
        """Returns whether this process holds a variable; see `Ability.holds`."""
        return not is_elsewhere(variable)

    def per_process_variables(self, model: Any) -> list[Any]:
        """Returns the optimizers' variables that one process holds; see `DataParallel.per_process_variables`."""
        self.place(model)
        return [slot for slot, _ in self._slots_of(model).values()]

    def remote(self, model: Any) -> RemoteVariables:
        """Returns an object that reads and assigns the optimizers' variables of all; see `DividesUpdates`."""
        self.place(model)
        slots = self._slots_of(model)
        return RemoteVariables(
            self.group, lambda slot: slots[id(slot)][1], [slot for slot, _ in slots.values()], self._name
        )

    def equalize(self, model: Any) -> None:
        """Broadcasts the chief's values of the variables that all processes hold; see `DividesUpdates`."""
        self.place(model)
        keras_variables.broadcast(model, self, without=self._slots_of(model).keys())

    def publish(self, optimizer: Any) -> None:
        """Sends the values of an optimizer's variables from their owners to all processes; see `DividesUpdates`."""
        dealing = self.ready(optimizer)
        if dealing is not None:
            keras_sharded.publish(self, dealing, variables_of(optimizer))
