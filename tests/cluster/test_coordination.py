"""The server's bookkeeping of collectives, without connections."""

import pytest

from tfdist.cluster.coordination import CollectiveCoordinator
from tfdist.cluster.messages import (
    AgreeOnKey,
    AllJoined,
    CollectiveCall,
    Invite,
    Invited,
    Join,
    RankJoined,
    RankStatus,
    Reply,
    Resumed,
    StandIn,
    StatusRequest,
    WaitingForCall,
)


class Job:
    """A coordination, what it told each rank, and why it failed."""

    def __init__(self, size):
        self.told = {rank: [] for rank in range(size)}
        self.failures = []
        self.later = []
        self.coordination = CollectiveCoordinator(
            size,
            lambda rank: f"rank {rank}, task {rank},",
            lambda rank, m: self.told[rank].append(m),
            lambda why, members: self.failures.append((why, members)),
            lambda seconds, then: self.later.append(then),
        )

    def hear(self, rank, message):
        self.coordination.heard(rank, message)

    def agree(self, rank, key, signature="", members=None):
        self.hear(rank, AgreeOnKey(len(self.told[rank]), key, signature, members))

    def stand(self, rank, key, number, call, counts, members=None, is_alone=True):
        self.hear(rank, WaitingForCall(CollectiveCall(key, number, call, members), counts, is_alone))

    def replies(self, rank):
        return [message for message in self.told[rank] if isinstance(message, Reply)]

    def numbers(self, rank):
        return [message.value for message in self.replies(rank)]


@pytest.fixture
def job():
    return Job(3)


def test_a_number_is_told_when_all_members_have_asked(job):
    job.agree(0, "a")
    job.agree(1, "a")
    assert job.numbers(0) == []
    job.agree(2, "a")
    assert [job.numbers(rank) for rank in range(3)] == [[0]] * 3
    job.agree(0, "b", members=(0, 2))
    job.agree(2, "b", members=(0, 2))
    assert job.numbers(2) == [0, 1]
    assert job.numbers(1) == [0]


def test_different_signatures_fail_the_job(job):
    job.agree(0, "a", "float32 (3,)")
    job.agree(1, "a", "float32 (4,)")
    assert job.failures[0][0].startswith("ranks differ in a: rank 0 has float32 (3,), rank 1 has float32 (4,)")


def test_a_mismatch_concerns_the_members_of_its_group(job):
    job.agree(0, "a", "float32 (3,)", members=(0, 2))
    job.agree(2, "a", "float32 (4,)", members=(0, 2))
    assert [members for _, members in job.failures] == [(0, 2)]
    job.stand(0, "a", 0, 1, {0: 2, 1: 1}, members=(0, 1))
    job.stand(1, "b", 1, 1, {0: 1, 1: 2}, members=(0, 1))
    assert [members for _, members in job.failures[1:]] == [(0, 1)]


def test_deadlock_of_two_ranks_is_reported_while_third_computes(job):
    job.agree(0, "a")
    job.agree(1, "b")
    job.stand(0, "a", None, 0, {})
    job.stand(1, "b", None, 0, {})
    assert not job.failures
    (after_a_while,) = job.later
    after_a_while()
    assert "rank 0 waits in a; rank 1 waits in b." in job.failures[0][0]


@pytest.mark.parametrize("of_third", ["a", "b", "c"])
def test_deadlocked_calls_not_begun_are_refused_without_job_failure(job, of_third):
    keys = ["a", "b", of_third]
    for rank, key in enumerate(keys):
        job.agree(rank, key)
        job.stand(rank, key, None, 0, {})
    for rank in range(3):
        (refused,) = job.replies(rank)
        assert f"rank 0 waits in a; rank 1 waits in b; rank 2 waits in {of_third}." in refused.error
        job.hear(rank, Resumed())
    for after_a_while in job.later:
        after_a_while()
    assert not job.failures
    for rank in range(3):
        job.agree(rank, "a")
    (number,) = {job.numbers(rank)[-1] for rank in range(3)}
    assert number >= 2, "numbers are not used again"


def test_deadlock_after_an_outdated_report_fails_the_job(job):
    """The rank stood still until the other ranks came, and has not reported yet that it goes on."""
    for rank in range(3):
        job.agree(rank, "c")
        job.stand(2, "c", None, 0, {})
    for rank, key in enumerate("ab"):
        job.agree(rank, key)
        job.stand(rank, key, None, 0, {0: 1})
    assert [len(job.replies(rank)) for rank in range(3)] == [1, 1, 1], "the number of c alone"
    job.later[0]()
    assert "rank 0 waits in a; rank 1 waits in b." in job.failures[0][0]


@pytest.mark.parametrize("why", ["another call is under way", "a number is known", "a rank has joined"])
def test_deadlocked_calls_that_may_have_begun_fail_the_job(why):
    job = Job(2)
    if why == "a rank has joined":
        job = Job(3)
        job.hear(2, Join({}))
    number = 0 if why == "a number is known" else None
    job.agree(1, "b")
    if number is None:
        job.agree(0, "a")
    job.stand(0, "a", number, 1, {0: 2}, is_alone=why != "another call is under way")
    job.stand(1, "b", None, 0, {0: 1})
    assert not job.replies(1)
    assert "rank 0 waits in a; rank 1 waits in b." in job.failures[0][0]


def test_deadlock_in_numbered_collectives_fails_the_job(job):
    job.stand(0, "a", 0, 5, {0: 6, 1: 2})
    job.stand(1, "b", 1, 2, {0: 5, 1: 3})
    assert "rank 0 waits in a; rank 1 waits in b." in job.failures[0][0]


def test_waiting_for_a_late_third_rank_is_no_deadlock(job):
    job.stand(0, "a", 0, 5, {0: 6})
    job.stand(1, "a", 0, 5, {0: 6})
    assert not job.failures
    job.hear(0, Resumed())
    job.stand(0, "b", 1, 0, {0: 6, 1: 1})
    assert not job.failures, "rank 1's report is old, and does not lack what rank 0 waited for"


def test_report_from_before_a_number_was_known_lacks_no_call(job):
    """Rank 0 has begun to send, and waits for an answer; rank 1 comes late, and what it receives takes long."""
    pair = 0, 1
    job.agree(0, "there", members=pair)
    job.agree(0, "back", members=pair)
    job.stand(0, "back", None, 0, {}, members=pair)
    job.agree(1, "there", members=pair)
    job.stand(1, "there", 0, 0, {0: 1}, members=pair)
    assert not job.failures
    job.stand(0, "back", None, 0, {0: 1}, members=pair)
    assert not job.failures
    job.hear(1, Resumed())
    job.stand(1, "other", None, 0, {0: 1}, members=pair)
    assert not job.failures, "nothing is asked for"
    job.agree(1, "other", members=pair)
    job.stand(1, "other", None, 0, {0: 1}, members=pair, is_alone=False)
    assert "rank 0 waits in back in group [0, 1]; rank 1 waits in other in group [0, 1]." in job.failures[0][0]


def test_deadlock_around_a_circle_of_groups_is_reported(job):
    job.stand(0, "a", 0, 1, {0: 2, 2: 1}, members=(0, 1))
    job.stand(1, "b", 1, 1, {0: 1, 1: 2}, members=(1, 2))
    assert not job.failures
    job.stand(2, "c", 2, 1, {1: 1, 2: 2}, members=(0, 2))
    waits = (
        "rank 0 waits in a in group [0, 1]",
        "rank 1 waits in b in group [1, 2]",
        "rank 2 waits in c in group [0, 2]",
    )
    assert f"{'; '.join(waits)}." in job.failures[0][0]


def test_a_joined_rank_is_not_waited_for_and_is_invited(job):
    job.agree(0, "a")
    job.hear(2, Join({7: 1}))
    job.agree(1, "a")
    assert job.numbers(0) == job.numbers(1) == [0]
    assert RankJoined(2, {7: 1}) in job.told[0]
    call, stand_in = CollectiveCall("a", 0, 0, None), StandIn("barrier")
    job.hear(0, Invite((2,), call, stand_in))
    assert job.told[2][-1] == Invited(call, stand_in)
    job.hear(1, Join({7: 2, 0: 1}))
    job.hear(0, Join({0: 3}))
    assert all(job.told[rank][-1] == AllJoined(0, {7: 2, 0: 3}) for rank in range(3))


def test_stall_explanation_lists_posted_calls_and_missing_ranks(job):
    job.coordination.ask()
    assert job.coordination.concerned() == {0, 1, 2}
    assert all(job.told[rank] == [StatusRequest()] for rank in range(3))
    job.hear(0, RankStatus((CollectiveCall("sum of 2 float32 #0", 4, 17, None, "kernel, bias"),), {4: 18}))
    job.hear(1, RankStatus((CollectiveCall("gather", 5, 0, None),), {4: 17, 5: 1}))
    report = job.coordination.explanation(60)
    assert report.late == {0: "rank 0, task 0,", 1: "rank 1, task 1,", 2: "rank 2, task 2,"}
    assert report.why.splitlines() == [
        "a rank has waited for more than 60 s.",
        "  rank 0 has posted sum of 2 float32 #0 (call 18: kernel, bias); missing: rank 1, rank 2.",
        "  rank 1 has posted gather (call 1); missing: rank 0, rank 2.",
        "  rank 0, task 0, has posted sum of 2 float32 #0; it has not posted gather.",
        "  rank 1, task 1, has posted gather; it has not posted sum of 2 float32 #0.",
        "  rank 2, task 2, does not answer: it is stopped, or its link is cut.",
    ]


def test_a_stall_concerns_the_members_of_the_group(job):
    job.coordination.ask()
    job.hear(0, RankStatus((CollectiveCall("sum", 4, 0, (0, 2)),), {4: 1}))
    job.hear(1, RankStatus((), {}))
    assert job.coordination.concerned() == {0, 2}
    report = job.coordination.explanation(60)
    assert "rank 1" not in report.why
    assert "rank 2, task 2, does not answer" in report.why
    assert report.late == {2: "rank 2, task 2,"}
