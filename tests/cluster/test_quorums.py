"""The server's bookkeeping of rounds that need a quorum, without connections and without a clock."""

import pytest

from tfdist.cluster.messages import Reply
from tfdist.cluster.quorum_messages import (
    AskFirstEpoch,
    ContributionsMissing,
    ContributionsReceived,
    Enlist,
    EpochReached,
    FetchEnded,
    FitEnded,
    MeetingAborted,
    ReadyForRound,
    ReplaceState,
)
from tfdist.cluster.quorums import QuorumCoordinator

GRACE = 5.0


class Job:
    """Bookkeeping, what it told each task, and the times of grace that run."""

    def __init__(self, quorum=2):
        self.told = {task: [] for task in range(4)}
        self.running = []
        self.quorums = QuorumCoordinator(
            lambda task, message: self.told[task].append(message),
            lambda seconds, then: self.running.append((seconds, then)),
            60.0,
        )
        self.quorum = quorum
        self.number = 0
        self.quorums.came(0)

    def hear(self, task, kind, *arguments):
        self.number += 1
        self.quorums.heard(task, kind(self.number, *arguments))
        return self.number

    def enlist(self, task, round=-1, settings="alike"):
        return self.hear(task, Enlist, "a", f"host{task}:1", round, self.quorum, GRACE, settings)

    def ready(self, task, round=1, samples=10, ends=False, fit=None, checksum=1):
        return self.hear(task, ReadyForRound, "a", round, samples, ends, fit, checksum)

    def have(self, task, attempt):
        return self.hear(task, ContributionsReceived, "a", attempt)

    def answer(self, task, request):
        """The value of a reply; None if there is none yet."""
        replies = [message for message in self.told[task] if isinstance(message, Reply) and message.id == request]
        assert len(replies) < 2
        assert not replies or replies[0].error is None, replies
        return replies[0].value if replies else None

    def is_answered(self, task, request):
        return any(isinstance(message, Reply) and message.id == request for message in self.told[task])

    def meets(self, task, request):
        """Those that a task meets, or None if the round has not begun."""
        answer = self.answer(task, request)
        return None if answer is None else [partner["task"] for partner in answer["partners"]]

    def expire(self):
        running, self.running = self.running, []
        for _, then in running:
            then()

    def begun(self, *tasks):
        """All have enlisted and have the state of round 0."""
        for task in tasks:
            self.enlist(task)
            if task:
                self.enlist(task, 0)
        return self


def test_the_chief_begins_and_others_are_pointed_to_it():
    job = Job()
    early = job.enlist(1)
    assert job.answer(1, early) is None
    chief = job.enlist(0)
    assert job.answer(0, chief) == {"round": 0, "source": None, "address": "", "lost": 0}
    assert job.answer(1, early) == {"round": 0, "source": 0, "address": "host0:1", "lost": 0}


@pytest.mark.parametrize(("is_there", "seconds"), [(True, 60.0), (False, GRACE)])
def test_without_a_chief_another_task_begins_after_a_while(is_there, seconds):
    job = Job()
    if not is_there:
        job.quorums.gone(0, lost=True)
    requests = {task: job.enlist(task) for task in (2, 1)}
    assert [timer[0] for timer in job.running] == [seconds]
    job.expire()
    assert job.answer(1, requests[1])["source"] is None
    assert job.answer(2, requests[2])["source"] == 1


def test_a_round_begins_when_all_that_are_awaited_are_ready():
    job = Job().begun(0, 1, 2)
    requests = [job.ready(task, samples=task) for task in (2, 0)]
    assert job.meets(2, requests[0]) is None
    last = job.ready(1, samples=1)
    expected = [{"task": task, "samples": task, "address": f"host{task}:1"} for task in range(3)]
    for task, request in ((2, requests[0]), (0, requests[1]), (1, last)):
        assert job.answer(task, request) == {
            "attempt": 1,
            "partners": tuple(expected),
            "over": False,
            "epoch": 0,
            "astray": False,
        }


def test_quorum_starts_after_grace_and_late_task_gets_new_state():
    job = Job().begun(0, 1, 2)
    requests = [job.ready(task) for task in (0, 1)]
    assert [timer[0] for timer in job.running] == [GRACE]
    job.expire()
    assert job.meets(0, requests[0]) == job.meets(1, requests[1]) == [0, 1]
    during = job.ready(2)
    outcomes = [job.have(task, 1) for task in (0, 1)]
    assert job.answer(0, outcomes[0]) == job.answer(1, outcomes[1]) == {"counts": True, "ends": False}
    assert job.meets(2, during) == [], "the round was made without it"
    assert job.answer(2, job.enlist(2, 0))["round"] == 1
    # It has shown up, and is awaited again.
    requests = [job.ready(task, 2) for task in (0, 1)]
    assert job.meets(0, requests[0]) is None
    assert job.meets(2, job.ready(2, 2)) == [0, 1, 2]


def test_grace_of_an_earlier_round_starts_no_later_round():
    job = Job().begun(0, 1, 2)
    first = job.ready(0)
    assert not job.running
    job.ready(1)
    assert job.meets(2, job.ready(2)) == job.meets(0, first) == [0, 1, 2]
    for task in range(3):
        job.have(task, 1)
    second = [job.ready(task, 2) for task in (0, 1)]
    old, _, new = job.running
    old[1]()
    assert job.meets(0, second[0]) is None
    new[1]()
    assert job.meets(0, second[0]) == [0, 1]


def test_excluded_task_is_not_awaited_before_it_is_back():
    job = Job().begun(0, 1, 2)
    for task in (0, 1):
        job.ready(task)
    job.expire()
    for task in (0, 1):
        job.have(task, 1)
    requests = [job.ready(task, 2) for task in (0, 1)]
    assert job.meets(0, requests[0]) == [0, 1]


def test_lost_task_aborts_the_round_for_all():
    job = Job().begun(0, 1, 2)
    for task in range(3):
        job.ready(task)
    had = job.have(0, 1)
    assert job.answer(0, had) is None
    job.quorums.gone(2, lost=True)
    assert job.answer(0, had) == {"counts": False, "ends": False}
    assert MeetingAborted("a", 1) in job.told[0]
    assert MeetingAborted("a", 1) in job.told[1]
    assert job.answer(1, job.have(1, 1)) == {"counts": False, "ends": False}, "of an attempt that is over"
    again = [job.ready(task) for task in (0, 1)]
    assert job.meets(0, again[0]) == [0, 1]
    outcomes = [job.have(task, 2) for task in (0, 1)]
    assert [job.answer(task, outcomes[task])["counts"] for task in (0, 1)] == [True, True]


def test_task_lost_after_finishing_does_not_abort_the_round():
    job = Job().begun(0, 1)
    for task in (0, 1):
        job.ready(task)
    job.have(1, 1)
    job.quorums.gone(1, lost=True)
    assert job.answer(0, job.have(0, 1))["counts"]
    assert job.answer(2, job.enlist(2))["source"] == 0, "and is no source of its state"


def test_task_that_comes_again_gets_no_answer_of_its_predecessor():
    job = Job().begun(0, 1)
    requests = [job.ready(task) for task in range(2)]
    attempt = job.answer(0, requests[0])["attempt"]
    of_the_predecessor = job.have(0, attempt)
    job.quorums.gone(0, lost=True)
    request = job.enlist(0)
    other = job.have(1, attempt)
    assert job.answer(1, other)["counts"]
    assert not job.is_answered(0, of_the_predecessor), "its number may be that of another request by now"
    assert job.answer(0, request)["source"] == 1


def test_partners_of_which_nothing_comes_are_left_out():
    job = Job().begun(0, 1, 2)
    for task in range(3):
        job.ready(task)
    job.quorums.heard(0, ContributionsMissing("a", 1, (2,)))
    job.quorums.heard(1, ContributionsMissing("a", 1, (2,)))
    assert [message for message in job.told[1] if isinstance(message, MeetingAborted)] == [MeetingAborted("a", 1)]
    again = job.ready(2)
    requests = [job.ready(task) for task in (0, 1)]
    assert job.meets(0, requests[0]) == [0, 1]
    assert job.answer(2, again) is None, "it is not in another meeting for this round"
    job.have(0, 2)
    job.have(1, 2)
    assert job.meets(2, again) == []


def test_a_partner_that_does_not_have_everything_in_time_is_left_out():
    job = Job().begun(0, 1, 2)
    for task in range(3):
        job.ready(task)
    had = [job.have(task, 1) for task in (0, 1)]
    job.expire()
    assert [job.answer(task, had[task])["counts"] for task in (0, 1)] == [False, False]
    requests = [job.ready(task) for task in (0, 1)]
    assert job.meets(0, requests[0]) == [0, 1]
    job.expire()
    assert [message for message in job.told[0] if isinstance(message, MeetingAborted)] == [MeetingAborted("a", 1)], (
        "the first time is over"
    )
    job.have(0, 2)
    assert job.answer(1, job.have(1, 2))["counts"]


def test_task_needed_for_the_quorum_is_not_excluded():
    job = Job(quorum=2).begun(0, 1)
    for task in (0, 1):
        job.ready(task)
    job.have(0, 1)
    job.quorums.heard(0, ContributionsMissing("a", 1, (1,)))
    job.expire()
    assert not [message for message in job.told[0] if isinstance(message, MeetingAborted)]
    assert job.answer(1, job.have(1, 1))["counts"]


def test_excluded_task_is_included_again_when_another_is_lost():
    job = Job(quorum=2).begun(0, 1, 2)
    for task in range(3):
        job.ready(task)
    job.quorums.heard(0, ContributionsMissing("a", 1, (2,)))
    late, first = job.ready(2), job.ready(0)
    assert job.answer(2, late) is None
    job.quorums.gone(1, lost=True)
    assert job.meets(0, first) == job.meets(2, late) == [0, 2]


def test_round_does_not_wait_for_departed_or_outdated_tasks():
    job = Job().begun(0, 1, 2, 3)
    job.quorums.gone(3, lost=False)
    job.ready(0)
    job.ready(1)
    job.expire()
    job.have(0, 1)
    job.have(1, 1)
    job.enlist(2, 0)
    assert job.meets(0, (job.ready(0, 2), job.ready(1, 2))[0]) == [0, 1], "its state is old: it has to be ready first"


def test_the_end_of_an_epoch_is_told_to_all():
    job = Job().begun(0, 1)
    job.ready(0, ends=True)
    job.ready(1)
    job.have(0, 1)
    assert job.answer(1, job.have(1, 1)) == {"counts": True, "ends": True}


def test_the_end_of_an_epoch_does_not_end_one_that_has_begun_since():
    job = Job().begun(0, 1)
    for task in (0, 1):
        job.quorums.heard(task, EpochReached(1, task))
    job.ready(0, ends=True)
    job.ready(1)
    had = job.have(0, 1)
    assert job.answer(1, job.have(1, 1)) == {"counts": True, "ends": False}
    assert job.answer(0, had) == {"counts": True, "ends": True}


def test_late_tasks_learn_the_epoch_of_each_fit():
    job = Job().begun(0)
    assert job.answer(1, job.hear(1, AskFirstEpoch, 0)) == 0
    job.quorums.heard(0, EpochReached(0, 3))
    assert job.answer(1, job.hear(1, AskFirstEpoch, 0)) == 3
    assert job.answer(1, job.hear(1, AskFirstEpoch, 1)) == 0
    waiting = job.ready(0, fit=0)
    job.quorums.heard(1, EpochReached(1, 0))
    assert job.answer(0, waiting)["over"], "the others have ended the first call of fit"
    assert job.answer(1, job.hear(1, AskFirstEpoch, 0)) == -1
    assert job.answer(0, job.ready(0, fit=0))["over"]


@pytest.mark.parametrize(("lost", "epoch"), [(True, 0), (False, 3)])
def test_training_restarts_when_the_last_task_with_state_is_lost(lost, epoch):
    job = Job().begun(0)
    job.quorums.heard(0, EpochReached(0, 3))
    job.quorums.gone(0, lost)
    assert job.answer(1, job.hear(1, AskFirstEpoch, 0)) == epoch


def test_older_states_are_used_when_the_newer_ones_are_lost():
    job = Job(quorum=1).begun(0, 1)
    job.ready(0)
    job.expire()
    job.have(0, 1)
    assert job.answer(1, job.ready(1)) is not None
    job.quorums.gone(0, lost=True)
    assert job.answer(1, job.enlist(1, 0)) == {"round": 0, "source": None, "address": "", "lost": 1}
    assert job.answer(1, job.enlist(1, 0))["lost"] == 0, "is told once"
    assert job.meets(1, job.ready(1)) == [1]


def test_task_with_different_checksum_restores_the_first_tasks_state():
    job = Job().begun(1, 2, 0)
    requests = {task: job.ready(task, checksum=int(task == 0)) for task in range(3)}
    assert job.answer(0, requests[0]) == {"attempt": 0, "partners": (), "over": False, "epoch": 0, "astray": True}
    assert job.meets(1, requests[1]) is None, "the round waits for it"
    assert job.answer(0, job.enlist(0)) == {"round": 0, "source": 1, "address": "host1:1", "lost": 0}
    assert job.meets(0, job.ready(0, checksum=0)) == job.meets(1, requests[1]) == [0, 1, 2]


def test_diverged_task_is_awaited_for_the_grace_only():
    job = Job(quorum=1).begun(0, 1)
    request = job.ready(0)
    job.ready(1, checksum=2)
    assert job.meets(0, request) is None
    job.expire()
    assert job.meets(0, request) == [0]


def test_replaced_state_becomes_the_newest():
    job = Job().begun(0, 1, 2)
    waiting = job.ready(1)
    assert job.answer(0, job.hear(0, ReplaceState, "a")) == 1
    assert job.meets(1, waiting) == []
    assert job.answer(1, job.enlist(1, 0)) == {"round": 1, "source": 0, "address": "host0:1", "lost": 0}


def test_replaced_state_aborts_the_running_round():
    job = Job().begun(0, 1, 2)
    requests = [job.ready(task) for task in (0, 1)]
    job.expire()
    assert job.meets(0, requests[0]) == [0, 1]
    has, waiting = job.have(0, 1), job.ready(2)
    job.hear(2, ReplaceState, "a")
    assert job.answer(0, has) == {"counts": False, "ends": False}
    assert MeetingAborted("a", 1) in job.told[1]
    assert job.meets(2, waiting) == job.meets(1, job.ready(1)) == []


def test_different_settings_are_refused():
    job = Job().begun(0)
    number = job.enlist(1, settings="others")
    refused = [message for message in job.told[1] if message.id == number]
    assert "task 1 has quorum=2, grace=5, others; the others have quorum=2, grace=5, alike" in refused[0].error


def test_messages_of_a_task_that_has_not_enlisted_are_left_alone():
    job = Job().begun(0, 1)
    job.ready(2)
    job.quorums.heard(2, ContributionsMissing("b", 1, (0,)))
    assert not job.told[2]


def test_the_first_round_waits_for_a_task_that_has_enlisted_and_has_no_state_yet():
    job = Job()
    for task in range(3):
        job.enlist(task)
    first, second = job.ready(0), job.ready(1)
    assert job.meets(0, first) is job.meets(1, second) is None
    third = job.ready(2)
    assert job.meets(0, first) == job.meets(2, third) == [0, 1, 2]


class AfterFit(Job):
    """Task 0 has made a round alone, and has ended the call of `fit` that task 1 is in."""

    def __init__(self):
        super().__init__(quorum=1)
        self.begun(0, 1)
        for task in range(2):
            self.quorums.heard(task, EpochReached(0, 3))
        request = self.ready(0)
        self.expire()
        self.have(0, self.answer(0, request)["attempt"])
        self.quorums.heard(0, EpochReached(1, 0))
        self.request = self.hear(0, FitEnded, 0, ("a",))

    @property
    def is_released(self):
        return self.is_answered(0, self.request)


def test_finished_task_lingers_until_others_have_newest_state():
    job = AfterFit()
    assert not job.is_released
    job.enlist(1, 0)  # is pointed to it
    assert not job.is_released
    job.ready(1, round=2)
    assert job.is_released, "who is ready for the next round has the state of this one"


@pytest.mark.parametrize("ends", ["has the state", "is gone", "says no more"])
def test_finished_task_lingers_while_another_fetches_a_state(ends):
    """A large state may take longer than the time of grace, as may the search for another source of it."""
    job = AfterFit()
    assert job.answer(1, job.enlist(1, 0))["source"] == 0
    for _ in range(3):
        job.expire()
        assert not job.is_released
    if ends == "is gone":
        job.quorums.gone(1, lost=True)
    else:
        job.quorums.heard(1, FetchEnded("a"))
        if ends == "has the state":
            job.enlist(1, 1)
        else:
            assert not job.is_released
            job.expire()
    assert job.is_released


@pytest.mark.parametrize("how", ["has ended fit, too", "is gone", "does nothing for the time of grace"])
def test_finished_task_is_released_when_no_task_needs_state(how):
    job = AfterFit()
    assert not job.is_released
    if how == "has ended fit, too":
        job.quorums.heard(1, EpochReached(1, 0))
    elif how == "is gone":
        job.quorums.gone(1, lost=True)
    else:
        assert job.running[-1][0] == 10.0, "which is longer than the time of grace"
        job.expire()
    assert job.is_released


def test_finished_task_gets_the_state_of_the_last_round():
    """As a slow end of `fit` may take longer than the time of grace, and the others then meet without it."""
    job = Job(quorum=2).begun(0, 1, 2)
    for task in range(3):
        job.quorums.heard(task, EpochReached(0, 0))
    requests = [job.ready(task, fit=0) for task in (1, 2)]
    job.expire()
    attempt = job.answer(1, requests[0])["attempt"]
    first = job.hear(0, FitEnded, 0, ("a",))
    assert not job.is_answered(0, first), "others meet"
    for task in (1, 2):
        job.have(task, attempt)
    assert job.is_answered(0, first)
    others = [(task, job.hear(task, FitEnded, 0, ("a",))) for task in (1, 2)]
    assert not any(job.is_answered(*request) for request in others), "task 0 looks for the newest state next"
    assert job.answer(0, job.enlist(0, 0)) == {"round": 1, "source": 1, "address": "host1:1", "lost": 0}
    assert not any(job.is_answered(*request) for request in others)
    assert job.answer(0, job.enlist(0, 1))["source"] is None
    assert all(job.is_answered(*request) for request in others)


def test_excluded_task_ends_when_others_have_ended_fit():
    """The task was too slow for a round that no task makes any more, because a third task has ended `fit`."""
    job = Job(quorum=1).begun(0, 1, 2)
    for task in range(3):
        job.quorums.heard(task, EpochReached(0, 0))
    requests = [job.ready(task, fit=0) for task in (1, 2)]
    job.expire()
    assert job.meets(1, requests[0]) == [1, 2]
    job.have(1, job.answer(1, requests[0])["attempt"])
    job.expire()
    assert MeetingAborted("a", 1) in job.told[2]
    job.enlist(0, 0)  # it looks for a newer state, and is awaited then
    others = [(task, job.ready(task, fit=0)) for task in (2, 1)]
    assert not any(job.is_answered(*entry) for entry in others)
    job.hear(0, FitEnded, 0, ("a",))
    for task, request in others:
        assert job.answer(task, request)["over"]
    job.quorums.gone(0, lost=False)
    job.quorums.gone(1, lost=False)
    assert len([entry for entry in job.told[2] if isinstance(entry, Reply)]) == 4, "nothing comes of it later"


def test_outdated_tasks_do_not_wait_for_each_other():
    job = Job(quorum=1).begun(0, 1, 2)
    request = job.ready(2)
    job.expire()
    job.have(2, job.answer(2, request)["attempt"])
    requests = [job.hear(task, FitEnded, 0, ("a",)) for task in range(3)]
    assert [job.is_answered(task, request) for task, request in enumerate(requests)] == [True, True, False]


def test_tasks_lacking_each_others_state_do_not_deadlock():
    """Each task has made a round without the other: one of the weights, the other of the layers' state."""
    job = Job(quorum=1).begun(0, 1)
    for task in range(2):
        job.hear(task, Enlist, "b", f"host{task}:1", task - 1, 1, GRACE, "alike")
    job.hear(1, Enlist, "b", "host1:1", 0, 1, GRACE, "alike")
    for task in range(2):
        job.quorums.heard(task, EpochReached(0, 0))
    for task, name in enumerate("ab"):
        request = job.hear(task, ReadyForRound, name, 1, 10, True, 0, 1)
        job.expire()
        job.hear(task, ContributionsReceived, name, job.answer(task, request)["attempt"])
    first, second = (job.hear(task, FitEnded, 0, ("a", "b")) for task in range(2))
    assert job.is_answered(0, first), "it gets the state of b, and comes back"
    assert job.is_answered(1, second), "likewise of a"
    job.hear(0, Enlist, "b", "host0:1", 1, 1, GRACE, "alike")
    again = job.hear(0, FitEnded, 0, ("a", "b"))
    assert not job.is_answered(0, again), "the other one may still be about to fetch that of a"
    job.hear(1, Enlist, "a", "host1:1", 1, 1, GRACE, "alike")
    assert job.is_answered(0, again)


def test_task_is_released_when_all_have_the_newest_state():
    job = Job().begun(0, 1)
    for task in range(2):
        job.quorums.heard(task, EpochReached(0, 0))
    request = job.hear(0, FitEnded, 0, ("a",))
    assert job.is_answered(0, request)
