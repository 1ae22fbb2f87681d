"""The `extended` of `QuorumStrategy`: a process that trains alone, and meets others in rounds."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engine.group import ProcessGroup
from tfdist.errors import PeerLostError
from tfdist.local_sgd.course import Live, Progress, VariableGroup
from tfdist.local_sgd.rules import Averaging
from tfdist.private import tensorflow as private
from tfdist.private.models import initial_epoch
from tfdist.quorum.course import QuorumRounds, QuorumRoundsFactory, Totals
from tfdist.quorum.members import end_together
from tfdist.strategies.keras import keras_variables
from tfdist.strategies.keras.keras_optimizers import innermost
from tfdist.strategies.round_abilities import ElasticMembership
from tfdist.strategies.rounds import keras_quorum
from tfdist.strategies.rounds.rounds_extended import RoundsExtended
from tfdist.strategies.rounds.steps_in_rounds import assign, read

log = logging.getLogger("tfdist")

_LOOK_SECONDS = 0.1


class QuorumExtended(RoundsExtended, ElasticMembership):
    """The `RoundsExtended` of `QuorumStrategy`, whose group is this process alone.

    Args:
        strategy: the strategy that this is the `extended` of.
        group: a group that contains this process alone.
        devices: this process's devices.
        courses: factory of the course of each optimizer's rounds.
        rank: rank of this process among the training tasks.
        size: number of training tasks, present or not.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        group: ProcessGroup,
        devices: list[str],
        courses: QuorumRoundsFactory,
        rank: int,
        size: int,
    ) -> None:
        super().__init__(strategy, group, devices, courses, checks_weights=False)
        keras_quorum.install()
        self._quorums = courses
        self._rank, self._size = rank, size
        self._task_id = self.reader = rank
        self._states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()
        self._models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._is_catching_up = False  # whether the others have ended the call of `fit` that this process made last

    @property
    def is_writer(self) -> bool:
        """Whether this process is the chief of the job, which writes files."""
        return self._rank == 0

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the job; None if there is none."""
        return self._quorums.members.failure

    @property
    def totals(self) -> Totals:
        """Number and duration of the rounds of all optimizers."""
        return self._quorums.totals

    def _courses_of_optimizers(self, model: Any) -> list[QuorumRounds]:
        return [steps.course for steps in self._of(model) if isinstance(steps.course, QuorumRounds)]

    def _courses_of(self, model: Any) -> list[QuorumRounds]:
        courses = self._courses_of_optimizers(model)
        return [*courses, self._states[model].course] if model in self._states else courses

    def _context_of_functions(self) -> Any:
        return private.InputContext(self._size, self._rank, self._num_replicas_in_sync)

    # Rounds.

    def build(self, optimizer: Any, variables: list[Any]) -> None:
        """Builds an optimizer outside of any `tf.function`, which would set variables too late for other processes."""
        strategy, build = self._container_strategy(), super().build

        def work() -> None:
            with strategy.scope():
                build(optimizer, variables)

        with ThreadPoolExecutor(1) as thread:  # which traces no function, and is no replica
            thread.submit(work).result()

    @contextlib.contextmanager
    def counting(self, samples: Any) -> Iterator[None]:
        """Context that sets the number of samples of a step."""
        self.samples = samples
        try:
            yield
        finally:
            self.samples = 1

    def settle(self, model: Any) -> None:
        """Ends the round; averages layers' state, too, if this process has trained."""
        super().settle(model)
        progress = self._progress_of(model)
        if progress.step and self._make_state(model):
            self._states[model].settle(progress)

    def _progress_of(self, model: Any) -> Progress:
        return max(
            (steps.progress for steps in self._of(model)), key=lambda progress: progress.step, default=Progress(0, 0)
        )

    def _make_state(self, model: Any) -> bool:
        """Makes the rounds of a model's layers' state; returns whether it has such state."""
        if model not in self._states:
            variables = [
                variable
                for variable in (*keras_variables.state_of_layers(model), *self.moving_averages(model))
                if variable.dtype.startswith(("float", "bfloat"))
            ]
            if variables:
                self._states[model] = _State(f"state {self._model_number(model)}", variables, self._quorums)
        return model in self._states

    def _model_number(self, model: Any) -> int:
        if model not in self._models:
            self._models[model] = self.group.number("model in rounds")
        return self._models[model]

    def begin_fit(self, model: Any) -> int:
        """Joins a call of `fit`, and returns the epoch to begin at; see `ElasticMembership`."""
        members, optimizer = self._quorums.members, model.optimizer
        members.fit = self.group.number("fit in rounds")
        members.reach(members.fit, initial_epoch(model))  # the epoch of a backup, before others take weights from here
        self._model_number(model)
        for model_optimizer in keras_variables.optimizers(model):  # numbers must agree on all processes
            self._number(innermost(model_optimizer))
        self._refresh(model)
        if model.built and optimizer is not None:
            if not optimizer.built:
                self.build(optimizer, model.trainable_variables)
            with self._container_strategy().scope():
                self.step_begins(optimizer)
            self._make_state(model)
        epoch = members.epoch_of(members.fit)
        # Learning rates are those of the epoch in which they were read, which may have ended since.
        joined = [course.joined.epoch for course in self._courses_of_optimizers(model) if course.joined is not None]
        epoch = min([epoch, *(joined_epoch for joined_epoch in joined if joined_epoch >= 0)])
        if epoch < 0 and not any(course.round or course.joined for course in self._courses_of_optimizers(model)):
            self._missed_fit(optimizer)
        self._is_catching_up = epoch < 0
        return epoch

    def _missed_fit(self, optimizer: Any) -> None:
        """Says that the others have ended a call of `fit` and are gone, so that nobody has its weights.

        Raises:
            PeerLostError: this process writes the job's files, and has not trained.
        """
        missed = "the other processes have ended this call of fit, and no process is left that has its weights"
        if self.is_writer and not (optimizer is not None and optimizer.built and optimizer.iterations.numpy()):
            raise PeerLostError(
                f"{missed}: the chief, which writes the job's files, came back too late, and has initial weights only. "
                "Start the job again; with keras.callbacks.BackupAndRestore the chief goes on from its last backup."
            )
        log.warning("tfdist: %s: this process keeps its own weights.", missed)

    def share_loaded(self, model: Any) -> None:
        """Gives all processes the weights and optimizers that the chief has loaded."""
        courses = self._courses_of(model)
        if self._is_catching_up or not courses:
            return  # the others' weights come at the beginning of `fit`
        if self.is_writer:
            if model in self._states:
                self._states[model].recentre()
            for course in courses:
                course.replace()
            self.begin_rounds(model, anew=False)
            if model in self._states:
                self._states[model].begin(self._progress_of(model))
        elif not self._refresh(model, self._quorums.members.grace):
            log.warning(
                "tfdist: this process has waited for %g s for weights that the chief loads, but none came; it gets "
                "them in its next round, if the chief loads any.",
                self._quorums.members.grace,
            )

    def await_file(self, path: Any) -> None:
        """Waits, for at most the grace period, for a file that the chief may be about to write."""
        if self.is_writer:
            return
        end = time.monotonic() + self._quorums.members.grace
        while "://" not in os.fspath(path) and not os.path.exists(path) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def _refresh(self, model: Any, patience: float | None = None) -> bool:
        """Takes over newer states for all rounds of a model; see `StepsInRounds.refresh`."""
        refreshed = [steps.refresh(patience) for steps in self._of(model)]
        if model in self._states:
            refreshed.append(self._states[model].refresh(patience))
            if any(refreshed):  # steps are counted on from another process's number
                self._states[model].begin(self._progress_of(model))
        return any(refreshed)

    def begin_epoch(self, model: Any, epoch: int) -> None:
        """Records the epoch and its learning rates for processes that join."""
        members = self._quorums.members
        members.epoch, members.others = epoch, max(epoch, members.others)
        members.is_in_epoch = True
        for course in self._courses_of_optimizers(model):
            course.begin_epoch(epoch)
        if members.fit is not None:
            members.reach(members.fit, epoch)

    def epoch_has_ended(self, model: Any) -> bool:
        """Returns whether other processes have ended this epoch."""
        return self._quorums.members.is_behind or any(course.ended for course in self._courses_of(model))

    def fit_is_over(self, model: Any) -> bool:
        """Returns whether other processes have ended this call of `fit`."""
        return any(course.is_over for course in self._courses_of(model))

    def end_fit(self, model: Any) -> None:
        """Ends this call of `fit` together with the others, with the newest states."""
        members = self._quorums.members
        if members.fit is not None:
            end_together(members, [course.name for course in self._courses_of(model)], lambda: self._refresh(model))
        members.fit, members.epoch, members.others = None, 0, 0
        members.is_in_epoch = False
        for course in self._courses_of(model):
            course.end_fit()


class _State:
    """Layers' state of a model and moving averages of its weights, which are exchanged when an epoch ends.

    Args:
        name: name of the rounds, the same on all processes.
        variables: the floating-point variables that are exchanged.
        quorums: factory of the course of the rounds.
    """

    def __init__(self, name: str, variables: Sequence[Any], quorums: QuorumRoundsFactory) -> None:
        self._variables = variables
        self._progress = Progress(0, 0)
        with tf.init_scope(), tf.device("/cpu:0"):
            values = [np.array(value.numpy()) for value in read(variables)]
            paths = [variable.path for variable in variables]
            self.course = quorums.of_state(VariableGroup(name, paths, values, 0.0, _Still(self)), Averaging())
            if self.course.joined is not None:
                self._take_centre()

    @property
    def step(self) -> int:
        """Number of steps taken at the last exchange."""
        return self._progress.step

    def settle(self, progress: Progress) -> None:
        """Exchanges the changes; called on all processes that end an epoch.

        Args:
            progress: this process's numbers of samples and steps.
        """
        self._progress = progress
        if self.course.settle(progress, [np.array(value.numpy()) for value in read(self._variables)]).changes:
            self._take_centre()
            self.begin(progress)

    def recentre(self) -> None:
        """Makes the variables' values those that all processes have in common."""
        for place, value in enumerate(read(self._variables)):
            self.course.assigned(place, value.numpy(), self._progress)

    def refresh(self, patience: float | None) -> bool:
        """Takes over a newer state of another process; see `StepsInRounds.refresh`."""
        is_newer = self.course.refresh() if patience is None else self.course.follow(patience)
        if is_newer:
            self._take_centre()
        return is_newer

    def begin(self, progress: Progress) -> None:
        """Begins a round, with nothing left to exchange.

        Args:
            progress: this process's numbers of samples and steps.
        """
        self._progress = progress
        self.course.begin_anew(progress)

    def _take_centre(self) -> None:
        assign(self._variables, [tf.constant(value) for value in self.course.centre])


class _Still(Live):
    """The `Live` of layers' state, which no optimizer updates.

    Args:
        state: layers' state of a model.
    """

    def __init__(self, state: _State) -> None:
        self._state = state

    def state(self) -> list[np.ndarray]:
        """Returns no optimizer variables."""
        return []

    def left(self) -> int:
        """Returns 1, always."""
        return 1

    def step(self) -> int:
        """Returns the number of steps taken at the last exchange."""
        return self._state.step
