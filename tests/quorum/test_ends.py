"""All that take part in a `fit` end with the same values, whoever is slow: with real links and clocks, by chance.

Processes are threads. A time of grace is short, and some are often slower than that, also within a meeting.
"""

import contextlib
import random
import threading
import time

import numpy as np
import pytest

from tests.quorum.jobs import Job
from tfdist.local_sgd.course import Live, Progress, VariableGroup
from tfdist.local_sgd.intervals import Every
from tfdist.local_sgd.rules import Averaging
from tfdist.quorum.course import QuorumRounds
from tfdist.quorum.members import end_together

GRACE = 0.02
LONG = 10.0
"""Seconds for which a task that has ended `fit` stays for others at the most. That is never over here."""
EPOCHS, BATCHES, EVERY = 3, 6, 4


class Clocked(Job):
    """Times of grace are over when they are."""

    def _later(self, seconds, then):
        if seconds < LONG:
            timer = threading.Timer(seconds, self._run, [then])
            timer.daemon = True
            timer.start()


class Process(Live):
    """Trains as Keras does under `QuorumStrategy`: weights in rounds, and what layers keep at an epoch's end.

    Args:
        job: job that the process is in.
        task: number of the task.
        random: source of the process's delays and of its training.
    """

    def __init__(self, job, task, random):
        self.members, self._random = job.members[task], random
        self._step = self._samples = 0
        self._left, self._is_under_way = 1, False
        self._slow = 4 * GRACE * random.randint(1, 2)
        have = self.members.have
        self.members.have = lambda *given: self._pause() or have(*given)
        self.weights = self._course("weights", [np.full(3, float(task))], True)
        self.members.fit = 0
        self.members.reach(0, 0)
        self._begin()
        self.state_of_layers = self._course("state", [np.full(2, float(task))], False)
        self._state = list(self.state_of_layers.centre)

    def _course(self, name, values, are_weights):
        return QuorumRounds(
            *(self.members, Every(EVERY), Averaging(), None, VariableGroup(name, ["v"], values, 0.1, self), "alike"),
            are_weights=are_weights,
        )

    # As a `Live`.

    def state(self):
        return []

    def rates(self):
        return []

    def left(self):
        return max(1, self._left)

    def step(self):
        return self._step

    # As `Pace`, `StepsInRounds` and `QuorumExtended` do.

    @property
    def courses(self):
        return self.weights, self.state_of_layers

    def fit(self):
        epoch, members = self.members.epoch_of(0), self.members
        while 0 <= epoch < EPOCHS and not self._is_over:
            members.epoch, members.others, members.is_in_epoch = epoch, max(epoch, members.others), True
            self.weights.begin_epoch(epoch)
            members.reach(0, epoch)
            if not self._is_under_way:
                self._begin()
            for _ in range(BATCHES):
                self._train()
                if self._is_over or members.is_behind or any(course.ended for course in self.courses):
                    break
            self._settle()
            self._pause()
            epoch += 1
        end_together(members, ["weights", "state"], self._refresh)
        return [self._values[0].tolist(), self._state[0].tolist()]

    @property
    def _is_over(self):
        return any(course.is_over for course in self.courses)

    @property
    def _progress(self):
        return Progress(self._samples, self._step)

    def _pause(self):
        is_slow = self._random.random() < 0.2
        time.sleep(self._random.random() * (self._slow if is_slow else GRACE / 8))

    def _begin(self):
        self._values = [np.array(value) for value in self.weights.centre]
        self._left, self._is_under_way = self.weights.begin_anew(self._progress).left, False

    def _train(self):
        self._pause()
        self._values = [value + self._random.random() for value in self._values]
        self._state = [value + self._random.random() for value in self._state]
        self._step, self._samples, self._left = self._step + 1, self._samples + 10, self._left - 1
        self._is_under_way = True
        if self._left <= 0:
            turn, self._values = self.weights.take(0, self._progress, 0.1, self._values)
            self._left = turn.left

    def _settle(self):
        has_taken = self._is_under_way
        settled = self.weights.settle(self._progress, self._values)
        self._step = settled.step
        if settled.changes or has_taken:
            self._begin()
        if self.state_of_layers.settle(self._progress, self._state).changes:
            self._take_state()

    def _take_state(self):
        self._state = [np.array(value) for value in self.state_of_layers.centre]
        self.state_of_layers.begin_anew(self._progress)

    def _refresh(self):
        refreshed = [self.weights.refresh(), self.state_of_layers.refresh()]
        if refreshed[0]:
            self._begin()
        if refreshed[1]:
            self._take_state()
        return any(refreshed)


@pytest.mark.parametrize("seed", range(6))
def test_all_tasks_end_fit_with_equal_values(seed):
    with contextlib.closing(Clocked(3, quorum=1, grace=GRACE)) as job:
        for task in range(3):
            job.quorums.came(task)
        chance = random.Random(seed)
        generators = [random.Random(chance.random()) for _ in range(3)]
        first, *others = job.side_by_side(lambda task: Process(job, task, generators[task]).fit(), range(3))
    assert others == [first, first]
