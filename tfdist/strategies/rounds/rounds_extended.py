"""The `extended` of strategies whose processes take steps on their own, and exchange weights in rounds."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine.bridge import Bridge
from tfdist.engine.group import ProcessGroup
from tfdist.local_sgd import rules
from tfdist.local_sgd.course import Courses
from tfdist.local_sgd.rules import States
from tfdist.private import tensorflow as private
from tfdist.private.optimizers import apply_count, averages_of
from tfdist.strategies.all_reduce.cross_device import ProcessCrossDeviceOps
from tfdist.strategies.all_reduce.extended import AllReduceExtended
from tfdist.strategies.keras import keras_variables
from tfdist.strategies.keras.keras_optimizers import innermost
from tfdist.strategies.round_abilities import TrainsInRounds
from tfdist.strategies.rounds import keras_rounds
from tfdist.strategies.rounds.steps_in_rounds import Centre, StepsInRounds
from tfdist.strategies.stopping import StopRequestsInRounds

log = logging.getLogger("tfdist")

_NOT_RESTORED = (
    "tfdist: the state of the outer optimizer is not restored, because the optimizer %s is not built, so that its own "
    "variables are not restored either. Build it before you load weights (optimizer.build(model.trainable_variables)), "
    "or load the whole model."
)


class RoundsExtended(AllReduceExtended, TrainsInRounds):
    """An `AllReduceExtended` whose steps sum over the replicas of this process alone.

    Args:
        strategy: the strategy that this is the `extended` of.
        group: the processes that exchange weights.
        devices: this process's devices.
        courses: factory of the course of each optimizer's rounds.
        checks_weights: whether `fit` compares the ranks' weights after each epoch.
    """

    synchronizes_steps = False
    samples: Any = 1
    """Number of samples of a step whose batch is not a share."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        group: ProcessGroup,
        devices: list[str],
        courses: Courses,
        checks_weights: bool,
    ) -> None:
        super().__init__(strategy, group, devices, None, checks_weights)
        keras_rounds.install()
        self.exchange.broadcast_once(tf.constant(0), f"rounds of strategy {group.number('rounds')}", courses.described)
        self.compressor = courses.compressor
        self.averaging_processes = group.size
        self._courses = courses
        courses.wishes = StopRequestsInRounds(self.stopping)
        self._steps: weakref.WeakKeyDictionary[Any, StepsInRounds] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._restored: weakref.WeakKeyDictionary[Any, States] = weakref.WeakKeyDictionary()
        alone = ProcessGroup(group.engine, (group.members[group.rank],))
        self._within = Bridge(alone)
        local: Any = self._cross_device_ops.local
        self._step_ops = ProcessCrossDeviceOps(alone, local, self.shares)

    @property
    def step_bridge(self) -> Bridge:
        """Reduces tensors within steps, among the replicas of this process."""
        return self._within

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        # Reductions that replicas ask for in a step, such as the sum of their gradients.
        if self.group.size > 1 and not isinstance(options, private.OwnOptions):
            raise ValueError(
                f"all_reduce in a step: under {type(self._container_strategy()).__name__} each process takes its steps "
                "on its own, so that there is no reduction over all replicas. Leave out what needs one in each step, "
                "such as BatchNormalization(synchronized=True), or train with tfdist.AllReduceStrategy."
            )
        pairs = [(value, self._where(destinations)) for value, destinations in value_destination_pairs]
        return self._step_ops.batch_reduce(reduce_op, pairs, options)

    # Rounds.

    def build(self, optimizer: Any, variables: list[Any]) -> None:
        """Builds an optimizer as Keras does."""
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True

    def step_begins(self, optimizer: Any) -> None:
        """Makes the rounds of an optimizer, if it is new."""
        self._steps_of(innermost(optimizer))

    def step_taken(self, optimizer: Any) -> None:
        """Counts a step, and makes the exchange whose turn it is, if any."""
        steps = self._steps_of(innermost(optimizer))

        def take(strategy: Any) -> None:
            steps.take(self.shares.total() if self.shares.step_is_shared else self.samples)

        tf.distribute.get_replica_context().merge_call(take)

    def _steps_of(self, optimizer: Any) -> StepsInRounds:
        if optimizer not in self._steps:
            restored = self._restored.pop(optimizer, [])
            self._steps[optimizer] = StepsInRounds(optimizer, self._number(optimizer), self._courses, restored)
        return self._steps[optimizer]

    def _number(self, optimizer: Any) -> int:
        """Returns an optimizer's number, equal on all processes, which make theirs in the same order."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self.group.number("optimizer in rounds")
        return self._numbers[optimizer]

    def begin_rounds(self, model: Any, anew: bool) -> None:
        """Begins a round for each optimizer of a model; see `TrainsInRounds`."""
        for steps in self._of(model):
            if anew:
                steps.recentre()
            steps.begin()

    def settle(self, model: Any) -> None:
        """Ends the rounds of a model's optimizers, and makes its weights equal."""
        attached = {id(innermost(optimizer)) for optimizer in keras_variables.optimizers(model)}
        chosen = [steps for steps in self._of(model) if steps.is_under_way or id(steps.optimizer) in attached]
        for steps in [steps for steps, changes in zip(chosen, self._settled(chosen), strict=True) if changes]:
            steps.take_centre()

    def _settled(self, chosen: Sequence[StepsInRounds]) -> list[bool]:
        """Settles the rounds of optimizers, and returns for each whether a process had taken a step.

        All at once: a process that still takes steps waits for exchanges of each optimizer in turn. Where optimizers
        share variables they are settled one after another, as each begins with what the one before has assigned.
        """
        variables = [id(variable) for steps in chosen for variable in steps.variables]
        if self.group.size == 1 or len(chosen) < 2 or len(set(variables)) < len(variables):
            return [steps.settle() for steps in chosen]
        with concurrent.futures.ThreadPoolExecutor(len(chosen)) as threads:
            return list(threads.map(StepsInRounds.settle, chosen))

    def outer_states(self, model: Any) -> list[States]:
        """Returns the states of outer optimizers to save; see `TrainsInRounds`."""
        steps = [self._steps.get(optimizer) for optimizer in _saved_optimizers(model)]
        return [
            [] if optimizer_steps is None else [rule.state() for rule, _ in optimizer_steps.course.rules]
            for optimizer_steps in steps
        ]

    def restore_outer(self, model: Any, states: Sequence[States]) -> None:
        """Restores the states of outer optimizers, also of those that are yet to be made."""
        nothing: States = []
        padded = itertools.chain(states, itertools.repeat(nothing))
        for optimizer, of_rules in zip(_saved_optimizers(model), padded, strict=False):
            if not (optimizer.built or int(apply_count(optimizer))):  # its own variables are not restored either
                if any(of_rules) and self.group.rank == 0:
                    log.warning(_NOT_RESTORED, optimizer.name)
                continue
            if optimizer in self._steps:
                rules.restore(self._steps[optimizer].course.rules, of_rules)
            else:
                self._restored[optimizer] = of_rules

    def distance(self, model: Any) -> float | None:
        """Returns the largest distance of weights from their mean; see `TrainsInRounds`."""
        distances = [steps.distance for steps in self._of(model) if steps.distance is not None]
        return max(distances, default=None)

    def staleness(self, model: Any) -> Counter[int]:
        """Returns how often weights of other processes were used, by their age in rounds."""
        return sum((steps.staleness for steps in self._of(model)), Counter())

    def assigned(self, variable: Any) -> None:
        """Notes that the user's program has assigned a value to a variable."""
        owners = [steps for steps in list(self._steps.values()) if steps.assigned(variable)]
        if not owners:
            Centre.renew(variable)  # for an optimizer that is yet to come, in place of one that is gone

    def _of(self, model: Any) -> list[StepsInRounds]:
        ids = {id(variable) for variable in model.variables}
        return [
            steps for steps in list(self._steps.values()) if any(id(variable) in ids for variable in steps.variables)
        ]

    def _optimizers_of(self, model: Any) -> list[Any]:
        """Returns the optimizers that a model was compiled with or updated by, and those within them."""
        outer = [getattr(model, "optimizer", None), *(steps.optimizer for steps in self._of(model))]
        inner = [innermost(optimizer) for optimizer in outer]
        every = [*outer, *inner, *(part for optimizer in inner for part in getattr(optimizer, "optimizers", ()))]
        return list({id(optimizer): optimizer for optimizer in every if optimizer is not None}.values())

    def per_process_variables(self, model: Any) -> list[Any]:
        """Returns the variables of a model's optimizers, which differ between processes."""
        return [variable for optimizer in self._optimizers_of(model) for variable in optimizer.variables]

    def moving_averages(self, model: Any) -> list[Any]:
        """Returns the moving averages of a model's weights; see `TrainsInRounds`."""
        optimizers, steps = self._optimizers_of(model), self._of(model)
        kept = [averages_of(optimizer) for optimizer in optimizers]
        averages = [variable for variables in kept for variable in variables if variable is not None]
        if not steps:
            return averages
        updated = {id(variable) for fragment_steps in steps for variable in fragment_steps.variables}
        followers = [variable for variable in model.trainable_variables if id(variable) not in updated]
        return averages + [variable for variable in followers if variable.dtype.startswith(("float", "bfloat"))]


def _saved_optimizers(model: Any) -> list[Any]:
    """Returns the optimizers that Keras saves with a model, in its order, without their wrappers."""
    inner = [innermost(optimizer) for optimizer in keras_variables.optimizers(model)]
    return list({id(optimizer): optimizer for optimizer in inner}.values())
