"""Abilities of strategies whose processes each update, or keep, a part of a model's variables."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.strategies.abilities import DataParallel

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.engine.bridge import Bridge
    from tfdist.engine.owned import Owned
    from tfdist.sharding import Ownership
    from tfdist.strategies.divided.dealing import Dealing
    from tfdist.strategies.divided.gathering import Collectives
    from tfdist.strategies.divided.remote_variables import RemoteVariables
    from tfdist.strategies.divided.split_axis import Split


class DividesUpdates(DataParallel):
    """A strategy whose processes each update some of a model's variables, and keep an optimizer's variables for those.

    Attributes:
        over_updaters: bridge that reduces tensors over the processes that update the variables of one model together.
        over_parts: bridge that reduces tensors over the processes that have the parts of the same weights.
    """

    over_updaters: Bridge
    over_parts: Bridge
    _leads = False
    """Whether this process, the writer, runs an action of `run_on_writer`."""

    @abc.abstractmethod
    def remote(self, model: Any) -> RemoteVariables:
        """Returns an object that reads and assigns the variables of all processes.

        Args:
            model: a Keras model that is built.
        """

    @property
    def takes_part_in_saving(self) -> bool:
        """Whether each process takes part when the writer saves a model: yes, since it gives its variables."""
        return True

    def run_on_writer(self, model: Any, action: Callable[[], Any]) -> Any:
        """Runs an action on the writer, while other processes give it their variables; see `Ability.run_on_writer`."""
        if self._leads:
            return action()
        remote = self.remote(model)
        if not self.is_writer:
            remote.answer()
            return None
        self._leads = True
        try:
            with remote.led(), self.local_only():
                return action()
        finally:
            self._leads = False

    @abc.abstractmethod
    def equalize(self, model: Any) -> None:
        """Gives all processes that hold a variable the value of the first of them; all processes call it.

        Args:
            model: a Keras model that is built.
        """

    @abc.abstractmethod
    def assign_part(self, variable: Any, value: Any) -> None:
        """Assigns this process's part of a value to a variable that it does not have whole, if it has a part.

        Args:
            variable: variable of a model, or of an optimizer.
            value: value of the whole variable.
        """

    @contextlib.contextmanager
    def updating(self, optimizer: Any) -> Iterator[None]:
        """Context in which an optimizer's variables are this process's parts, and all have all values after it.

        All processes enter it.

        Args:
            optimizer: Keras optimizer that updates the variables.
        """
        yield


class DealsVariables(DividesUpdates):
    """A strategy that deals the variables of each optimizer to its processes.

    Attributes:
        owned: collectives of variables that are dealt to one process each.
    """

    owned: Owned

    @abc.abstractmethod
    def deal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Deals the variables of an optimizer, before it makes its own variables.

        Args:
            optimizer: a Keras optimizer.
            variables: variables that it will update.
        """

    @abc.abstractmethod
    def dealing(self, optimizer: Any) -> Dealing | None:
        """Returns how the variables of an optimizer are dealt; None if each process updates all of them.

        Args:
            optimizer: a Keras optimizer.
        """

    @abc.abstractmethod
    def ready(self, optimizer: Any) -> Dealing | None:
        """Returns `dealing`, after allocating the variables of a built optimizer that this process holds.

        Args:
            optimizer: a Keras optimizer.
        """

    @abc.abstractmethod
    def place(self, model: Any) -> None:
        """Allocates the variables that this process holds of a model's optimizers.

        Args:
            model: a Keras model.
        """


class SplitsLayers(DataParallel):
    """A strategy that splits layers over the axes of a mesh, if it has one."""

    @abc.abstractmethod
    def number_of_parts(self, mesh_axis: str) -> int:
        """Returns the number of parts of weights that are split over an axis of the mesh.

        Args:
            mesh_axis: name of the axis.

        Raises:
            ValueError: the strategy has no mesh, or the mesh no such axis.
        """


class KeepsParts(DealsVariables, SplitsLayers):
    """A strategy whose processes each keep a part of some weights of a model."""

    @abc.abstractmethod
    def parts_of_new(self, variable: Any, split: Split | None) -> tuple[Ownership, Collectives] | None:
        """Returns the part of a new weight that each process keeps, and the weight's collectives.

        Args:
            variable: a Keras variable that a layer adds; it has a shape, and no value yet.
            split: how a layer that computes in parts wants it to be split; None for other layers.

        Returns:
            None if each process keeps the whole weight.

        Raises:
            ValueError: the weight cannot be split so.
        """

    @abc.abstractmethod
    def initial_value(self, variable: Any, value: Any) -> tf.Tensor:
        """Returns the chief's initial value of a weight.

        Args:
            variable: a Keras variable that all processes make.
            value: this process's initial value.
        """


class HasStages(DividesUpdates, SplitsLayers):
    """A strategy that divides a model into stages, of which this process may hold only some."""

    calls_host_in_steps = True

    @abc.abstractmethod
    def place(self, model: Any) -> None:
        """Divides a model into stages, and allocates the variables of this process's stages.

        Args:
            model: a Keras model that is built.

        Raises:
            ValueError: the model cannot be divided.
        """

    @abc.abstractmethod
    def check_batches(self, x: Any, batch_size: int | None) -> None:
        """Checks that the batches of a training can be divided into micro-batches.

        Args:
            x: the argument ``x`` of ``fit``.
            batch_size: the argument ``batch_size`` of ``fit``.

        Raises:
            ValueError: the batches cannot be divided.
        """

    @abc.abstractmethod
    def steps_of(self, model: Any) -> Any:
        """Returns the `tfdist.pipeline.model_steps.ModelSteps` of a model, which `place` has divided.

        Args:
            model: a Keras model that is built.
        """

    @abc.abstractmethod
    def values(self, model: Any, variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables as arrays, whichever process holds them; all processes call it.

        Args:
            model: a Keras model that is built.
            variables: variables of the model or of its optimizer.
        """
