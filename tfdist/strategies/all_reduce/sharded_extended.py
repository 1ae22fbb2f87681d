"""The `extended` of `AllReduceStrategy(shard="optimizer")`: each process keeps a part of the optimizers' variables."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.engine.bridge import Bridge
from tfdist.engine.owned import Owned
from tfdist.notices import notice
from tfdist.private.optimizers import clips_itself, updates_elements_apart, variables_of
from tfdist.sharding import Ownership
from tfdist.strategies.all_reduce import keras_sharded
from tfdist.strategies.all_reduce.extended import AllReduceExtended
from tfdist.strategies.divided.dealing import Dealing, contained
from tfdist.strategies.divided.described_variables import allocate, is_elsewhere
from tfdist.strategies.divided.footprint import footprint_of
from tfdist.strategies.divided.optimizer_slots import optimizer_variables
from tfdist.strategies.divided.remote_variables import RemoteVariables
from tfdist.strategies.divided_abilities import DealsVariables
from tfdist.strategies.keras import keras_variables

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Divided:
    """A variable that is divided among processes, or that one of them has.

    Attributes:
        variable: a Keras variable.
        owner: the processes that have it.
        part: what this process has of it, the value of a Keras variable.
    """

    variable: Any
    owner: Ownership
    part: Any


class ShardedExtended(AllReduceExtended, DealsVariables):
    """An `AllReduceExtended` with one device, whose processes each update the variables that are dealt to them."""

    more = ", shard='optimizer'"
    gathers_at_once = False
    """Whether the weights of which each process keeps some rows are gathered all at once, and once in a step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        keras_sharded.install()
        self.over_updaters = self.over_parts = Bridge(self.group)
        self.owned = Owned(self.group)
        self._dealings: weakref.WeakKeyDictionary[Any, Dealing] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        # Not of a model: ranks may have made other models before it, and name it otherwise.
        self._name = f"optimizers of sharded strategy {self.group.number('sharded strategy')}"

    # Dealing.

    def deal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Deals the variables of an optimizer; see `DealsVariables`."""
        if self.group.size == 1 or len(contained([optimizer])) > 1:  # those that it contains are dealt
            return
        if clips_itself(optimizer):
            if self.is_writer:
                log.warning(
                    "tfdist: the optimizer %s clips gradients in a method of its own, which may look at those of all "
                    "variables: each process updates all of them, and keeps all of the optimizer's variables.",
                    optimizer.name,
                )
            return
        dealing = Dealing(variables, self.group.size, self.group.rank, updates_elements_apart(optimizer))
        if dealing.is_complete:
            self._dealings[optimizer] = dealing
        elif self.is_writer:
            log.warning(
                "tfdist: shard='optimizer' divides large variables only, and the optimizer %s has %d for %d processes: "
                "each process updates all of them, and keeps all of the optimizer's variables.",
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
        return self._dealings.get(optimizer)

    def place(self, model: Any) -> None:
        """Allocates the variables that this process holds of a model's optimizers; see `DealsVariables`."""
        for optimizer in self._optimizers_of(model):
            self.ready(optimizer)

    def _allocate(self, optimizer: Any, dealing: Dealing) -> None:
        strategy = self._container_strategy()
        in_scope = tf.distribute.get_strategy() is strategy
        with self.local_only(), contextlib.nullcontext() if in_scope else strategy.scope():  # others hold others
            strays = dealing.place(optimizer)
            if strays:
                del self._dealings[optimizer]
                for variable in optimizer_variables(optimizer):
                    allocate(variable)
        if self.is_writer and optimizer not in self._told:
            self._told.add(optimizer)
            self.tell(optimizer, dealing, strays)

    def _optimizers_of(self, model: Any) -> list[Any]:
        """Returns the optimizers of a model whose variables are dealt."""
        compiled = getattr(model, "optimizer", None)
        known = keras_variables.optimizers(model) + ([] if compiled is None else [compiled])
        return [optimizer for optimizer in contained(known) if optimizer in self._dealings]

    def _divided(self, model: Any) -> dict[int, Divided]:
        """Returns the variables that processes do not all have whole, by their `id`, in the order of all processes."""
        dealings = [self._dealings[optimizer] for optimizer in self._optimizers_of(model)]
        return {
            id(slot): Divided(slot, dealing.owner(slot), dealing.part(slot))
            for dealing in dealings
            for slot in dealing.slots
        }

    # Variables of other processes.

    def holds(self, model: Any, variable: Any) -> bool:
        """Returns whether this process holds a variable; see `Ability.holds`."""
        return not is_elsewhere(variable)

    def per_process_variables(self, model: Any) -> list[Any]:
        """Returns the optimizers' variables that are dealt; see `DataParallel.per_process_variables`."""
        self.place(model)
        return [divided.variable for divided in self._divided(model).values()]

    def remote(self, model: Any) -> RemoteVariables:
        """Returns an object that reads and assigns the optimizers' variables of all; see `DividesUpdates`."""
        self.place(model)
        divided = self._divided(model)
        return RemoteVariables(
            self.group,
            lambda variable: divided[id(variable)].owner,
            [one.variable for one in divided.values()],
            self._name,
            lambda variable: divided[id(variable)].part,
        )

    def equalize(self, model: Any) -> None:
        """Broadcasts the chief's values of the variables that all processes hold; see `DividesUpdates`."""
        self.place(model)
        keras_variables.broadcast(model, self, without=self._divided(model).keys())

    def assign_part(self, variable: Any, value: Any) -> None:
        """Assigns this process's part of a value to a variable that is dealt; see `DividesUpdates`."""
        for dealing in self._dealings.values():
            dealing.assign_part(variable, value)

    @contextlib.contextmanager
    def updating(self, optimizer: Any) -> Iterator[None]:
        """Context in which an optimizer has this process's parts of its variables; see `DividesUpdates`."""
        dealing = self.ready(optimizer)
        if dealing is None:
            yield
            return
        dealing.refresh()
        with dealing.parts():
            yield
        keras_sharded.publish(self, dealing, variables_of(optimizer))

    def tell(self, optimizer: Any, dealing: Dealing, strays: Sequence[Any]) -> None:
        """Tells what the optimizer's variables take, and what a step sends; or why the optimizer is not divided."""
        if strays:
            log.warning(
                "tfdist: shard='optimizer' does not know to which weight the variable %s of the optimizer %s belongs: "
                "each process updates all weights, and keeps all of the optimizer's variables. Make such variables by "
                "add_variable_from_reference, or keep them in a list with one for each weight.",
                strays[0].path,
                optimizer.name,
            )
            return
        less = "" if self.compressor is None else " That is without compression, which gradients have."
        footprint = footprint_of(dealing, self.gathers_at_once)
        notice("tfdist: the optimizer %s is divided. %s%s", optimizer.name, footprint, less)
