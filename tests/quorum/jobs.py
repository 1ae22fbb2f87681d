"""Several processes that meet, as threads: real links and bookkeeping, without a rendezvous server between them."""

import itertools
import threading

import msgspec

from tfdist.cluster.quorum_messages import (
    AskFirstEpoch,
    ContributionsMissing,
    ContributionsReceived,
    Enlist,
    Enlisted,
    EpochReached,
    FetchEnded,
    FitEnded,
    Meeting,
    MeetingAborted,
    MeetingOutcome,
    ReadyForRound,
    ReplaceState,
)
from tfdist.cluster.quorums import QuorumCoordinator
from tfdist.errors import RendezvousError
from tfdist.quorum.links import Links

SECONDS = 120.0


class Job:
    """Tasks, and the bookkeeping of their rounds.

    Args:
        size: number of tasks.
        quorum: number of tasks that a round needs.
        grace: seconds after which a partner counts as silent; times of grace before rounds end by `expire`.
    """

    def __init__(self, size, quorum=1, grace=30.0):
        self.quorum, self.grace = quorum, grace
        self.changed = threading.Condition()
        self.replies, self.aborted, self.running = {}, {}, []
        self.running_at_once = False  # whether times of grace are over at once
        self.quorums = QuorumCoordinator(self._tell, self._later, 60.0)
        self.numbers = itertools.count()
        self.members = [Member(self, task) for task in range(size)]

    def _tell(self, task, message):
        if isinstance(message, MeetingAborted):
            self.aborted[task, message.rounds] = message.attempt
        else:
            self.replies[message.id] = message
        self.changed.notify_all()

    def _later(self, seconds, then):
        if self.running_at_once:
            threading.Timer(0.0, self._run, [then]).start()
        else:
            self.running.append(then)

    def _run(self, then):
        with self.changed:
            then()
            self.changed.notify_all()

    def tell(self, task, message):
        with self.changed:
            self.quorums.heard(task, message)
            self.changed.notify_all()

    def ask(self, task, kind, *arguments):
        number = next(self.numbers)
        with self.changed:
            self.quorums.heard(task, kind(number, *arguments))
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: number in self.replies, SECONDS), f"task {task}: {kind} {arguments}"
            reply = self.replies.pop(number)
        if reply.error is not None:
            raise RendezvousError(reply.error)
        return reply.value

    def lose(self, task):
        with self.changed:
            self.quorums.gone(task, lost=True)
            self.changed.notify_all()
        self.members[task].links.close()

    def until(self, condition):
        """Waits for what other threads bring about."""
        with self.changed:
            assert self.changed.wait_for(condition, SECONDS)

    def waiting(self, rounds):
        """Tasks that are ready for the next round."""
        return set(self.quorums._rounds[rounds].ready) if rounds in self.quorums._rounds else set()

    def expire(self):
        """All times of grace are over."""
        with self.changed:
            running, self.running = self.running, []
            for then in running:
                then()
            self.changed.notify_all()

    def side_by_side(self, work, tasks):
        """What ``work(task)`` returns for each task, in threads; raises the first error of one."""
        results, errors = {}, []

        def run(task):
            try:
                results[task] = work(task)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert errors or not thread.is_alive(), "a task waits for the others"
        if errors:
            raise errors[0]
        return [results[task] for task in tasks]

    def close(self):
        for member in self.members:
            member.links.close()


class Member:
    """`tfdist.quorum.members.Members` of a test."""

    def __init__(self, job, task):
        self.task, self.grace, self.patience = task, job.grace, SECONDS
        self.fit, self.epoch, self.others = None, 0, 0
        self.is_in_epoch = False
        self.links = Links(task, "127.0.0.1", None)
        self._job = job

    failure = None

    @property
    def is_behind(self):
        return self.others > self.epoch

    def offer(self, rounds, source):
        self.links.offer(rounds, source)

    def fetch(self, source, address, rounds):
        try:
            return self.links.fetch(address, rounds, SECONDS, lambda: True)
        finally:
            self._job.tell(self.task, FetchEnded(rounds))

    def enlist(self, rounds, round, settings, needs_quorum):
        fields = rounds, self.links.address, round, self._job.quorum if needs_quorum else 1, self.grace, settings
        return msgspec.convert(self._job.ask(self.task, Enlist, *fields), Enlisted)

    def ready(self, rounds, round, samples, ends, checksum):
        fields = rounds, round, samples, ends, self.fit, checksum
        return msgspec.convert(self._job.ask(self.task, ReadyForRound, *fields), Meeting)

    def replace(self, rounds):
        return self._job.ask(self.task, ReplaceState, rounds)

    def have(self, rounds, attempt):
        return msgspec.convert(self._job.ask(self.task, ContributionsReceived, rounds, attempt), MeetingOutcome)

    def lacks(self, rounds, attempt, tasks):
        self._job.tell(self.task, ContributionsMissing(rounds, attempt, tuple(tasks)))

    def is_aborted(self, rounds, attempt):
        return self._job.aborted.get((self.task, rounds), 0) >= attempt

    def epoch_of(self, fit):
        return self._job.ask(self.task, AskFirstEpoch, fit)

    def reach(self, fit, epoch):
        self._job.tell(self.task, EpochReached(fit, epoch))

    def linger(self, fit, rounds):
        self._job.ask(self.task, FitEnded, fit, rounds)
