"""The server's bookkeeping of collectives, without connections."""

import pytest

from tfdist.cluster.coordination import Coordination


class Job:
    """A coordination, what it told each rank, and why it failed."""

    def __init__(self, size):
        self.told = {rank: [] for rank in range(size)}
        self.failures = []
        self.coordination = Coordination(
            size,
            lambda rank: f"rank {rank}, task {rank},",
            lambda rank, m: self.told[rank].append(m),
            self.failures.append,
        )

    def hear(self, rank, **message):
        assert self.coordination.heard(rank, message)

    def agree(self, rank, key, signature="", members=None):
        self.hear(rank, type="agree", key=key, signature=signature, id=len(self.told[rank]), members=members)

    def stand(self, rank, key, number, call, counts, members=None):
        self.hear(rank, type="standing", key=key, number=number, call=call, counts=counts, members=members)

    def numbers(self, rank):
        return [message["number"] for message in self.told[rank] if "number" in message]


@pytest.fixture
def job():
    return Job(3)


def test_a_number_is_told_when_all_members_have_asked(job):
    job.agree(0, "a")
    job.agree(1, "a")
    assert job.numbers(0) == []
    job.agree(2, "a")
    assert [job.numbers(rank) for rank in range(3)] == [[0]] * 3
    job.agree(0, "b", members=[0, 2])
    job.agree(2, "b", members=[0, 2])
    assert job.numbers(2) == [0, 1]
    assert job.numbers(1) == [0]


def test_different_signatures(job):
    job.agree(0, "a", "float32 (3,)")
    job.agree(1, "a", "float32 (4,)")
    assert job.failures[0].startswith("ranks differ in a: rank 0 has float32 (3,), rank 1 has float32 (4,)")


def test_ranks_that_wait_for_each_other_are_told_although_another_computes(job):
    job.agree(0, "a")
    job.agree(1, "b")
    job.stand(0, "a", None, 0, {})
    assert not job.failures
    job.stand(1, "b", None, 0, {})
    assert "rank 0 waits in a; rank 1 waits in b." in job.failures[0]


def test_ranks_in_known_collectives_that_wait_for_each_other(job):
    job.stand(0, "a", 0, 5, {"0": 6, "1": 2})
    job.stand(1, "b", 1, 2, {"0": 5, "1": 3})
    assert "rank 0 waits in a; rank 1 waits in b." in job.failures[0]


def test_ranks_of_a_collective_that_a_third_is_late_for_do_not_wait_for_each_other(job):
    job.stand(0, "a", 0, 5, {"0": 6})
    job.stand(1, "a", 0, 5, {"0": 6})
    assert not job.failures
    job.hear(0, type="moving")
    job.stand(0, "b", 1, 0, {"0": 6, "1": 1})
    assert not job.failures, "rank 1's report is old, and does not lack what rank 0 waited for"


def test_a_circle_of_groups(job):
    job.stand(0, "a", 0, 0, {"0": 1}, members=[0, 1])
    job.stand(1, "b", 1, 0, {"1": 1}, members=[1, 2])
    assert not job.failures
    job.stand(2, "c", 2, 0, {"2": 1}, members=[0, 2])
    waits = (
        "rank 0 waits in a in group [0, 1]",
        "rank 1 waits in b in group [1, 2]",
        "rank 2 waits in c in group [0, 2]",
    )
    assert f"{'; '.join(waits)}." in job.failures[0]


def test_a_joined_rank_is_not_waited_for_and_is_invited(job):
    job.agree(0, "a")
    job.hear(2, type="join", counts={"7": 1})
    job.agree(1, "a")
    assert job.numbers(0) == job.numbers(1) == [0]
    assert {"type": "joined", "rank": 2, "counts": {"7": 1}} in job.told[0]
    job.hear(0, type="invite", to=[2], key="a", number=0, call=0)
    assert job.told[2][-1]["type"] == "invited"
    job.hear(1, type="join", counts={})
    job.hear(0, type="join", counts={})
    assert all(job.told[rank][-1] == {"type": "all joined", "last": 0} for rank in range(3))


def test_a_stall_is_explained(job):
    job.coordination.ask()
    assert all(job.told[rank] == [{"type": "report"}] for rank in range(3))
    under_way = {"key": "sum of 2 float32 #0", "number": 4, "call": 17, "members": None, "contents": "kernel, bias"}
    job.hear(0, type="state", under_way=[under_way], counts={"4": 18})
    other = {"key": "gather", "number": 5, "call": 0, "members": None, "contents": ""}
    job.hear(1, type="state", under_way=[other], counts={"4": 17, "5": 1})
    why = job.coordination.explanation(60)
    assert why.splitlines() == [
        "a rank has waited for more than 60 s.",
        "  rank 0 has posted sum of 2 float32 #0 (call 18: kernel, bias); missing: rank 1, rank 2.",
        "  rank 1 has posted gather (call 1); missing: rank 0, rank 2.",
        "  rank 0, task 0, has posted sum of 2 float32 #0; it has not posted gather.",
        "  rank 1, task 1, has posted gather; it has not posted sum of 2 float32 #0.",
        "  rank 2, task 2, does not answer: it is stopped, or its link is cut.",
    ]
