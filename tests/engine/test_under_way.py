"""The calls under way of one process; transfers are complete when the test says so."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tfdist.engine.operations import Operation
from tfdist.engine.pending import Pending
from tfdist.engine.under_way import CallsUnderWay
from tfdist.errors import MismatchError, PeerLostError


class Job:
    """Calls of rank 0 of three, with what they need of an engine."""

    def __init__(self):
        self.numbers, self.withdrawn, self.started, self.tags, self.arrived = {}, [], [], [], set()
        self.communicating, self.counts = False, {}
        self.statistics = SimpleNamespace(
            begun=0,
            communicating=SimpleNamespace(start=lambda: self.communicate(True), stop=lambda: self.communicate(False)),
        )
        numbers = SimpleNamespace(of=self.numbers.get, withdraw=self.withdrawn.append)
        self.link = Mock(rank=0, size=3, hosts=(0, 0, 0), completed=self.arrived.issuperset)
        self.calls = CallsUnderWay(self.link, numbers, self.statistics, 100, self.started.append)

    def communicate(self, value):
        assert self.communicating != value
        self.communicating = value

    def queued(self, key, members=None):
        """A call that is complete when its name has arrived."""
        pending = Pending(key, members)
        pending.call = self.counts[key] = self.counts.get(key, -1) + 1

        def schedule(communicator, tag):
            self.tags.append(tag)
            yield [f"{key} {pending.call}"]
            return f"result of {key} {pending.call}"

        pending.operation = Operation(schedule)
        self.calls.queue(pending)
        return pending


@pytest.fixture
def job():
    return Job()


def test_call_starts_when_its_site_has_a_number_and_ends_when_its_transfers_are_complete(job):
    first, other = job.queued("a"), job.queued("b")
    job.calls.start()
    assert not job.calls.can_move()
    assert not job.started
    job.numbers[None, "b"] = 7
    assert not job.calls.advance()
    assert job.started == [other]
    job.arrived.add("b 0")
    assert job.calls.advance()
    assert (other.done, other.result) == (True, "result of b 0")
    assert job.calls.calls() == [first]
    assert job.communicating
    job.calls.take_number((None, "a"), 8)
    assert job.calls.can_move()
    job.arrived.add("a 0")
    job.calls.advance()
    assert first.done
    assert not job.communicating
    assert job.statistics.begun == 2


def test_calls_of_a_site_start_in_order_and_only_as_many_as_have_tags(job):
    job.numbers[None, "a"] = 3
    pending = [job.queued("a") for _ in range(6)]
    job.calls.start()
    assert job.started == pending[:4]
    assert job.tags == [12, 13, 14, 15]
    job.arrived |= {"a 1", "a 2"}
    job.calls.advance()
    job.calls.advance()
    assert job.started == pending[:4], "the first still has the tag of the fifth, and the sixth waits for it"
    job.arrived.add("a 0")
    job.calls.advance()
    job.calls.advance()
    assert job.started == pending
    assert job.tags[4:] == [12, 13]


@pytest.mark.parametrize("is_alone", [True, False])
def test_only_call_can_be_withdrawn(job, is_alone):
    pending, error = job.queued("a"), MismatchError("ranks differ")
    if not is_alone:
        job.queued("b")
    assert job.calls.withdraw((None, "a"), error) == is_alone
    assert job.withdrawn == ([(None, "a")] if is_alone else [])
    assert pending.error is (error if is_alone else None)
    assert job.communicating == (not is_alone)


def test_calls_that_need_a_lost_rank_are_abandoned_and_the_others_go_on(job):
    lost, error = [job.queued("a"), job.queued("b", (0, 2))], PeerLostError("rank 2 died")
    kept = job.queued("c", (0, 1))
    job.numbers[(0, 2), "b"] = 1
    job.calls.start()
    job.calls.abandon(2, error)
    assert [pending.error for pending in (*lost, kept)] == [error, error, None]
    assert job.calls.calls() == [kept]
    job.numbers[(0, 1), "c"] = 2
    job.arrived.add("c 0")
    job.calls.advance()
    assert kept.done
    assert not job.communicating


def test_transfer_of_another_size_is_an_error_that_names_the_call(job):
    job.queued("sum", (0, 1))
    job.numbers[(0, 1), "sum"] = 1

    def differ(requests):
        raise MismatchError("rank 0 expected 8 bytes from rank 1, which sent 4")

    job.link.completed = differ
    with pytest.raises(MismatchError, match=r"sum in group \[0, 1\]: rank 0 expected 8 bytes"):
        job.calls.start()


def test_nothing_moves_after_a_broken_transfer_until_its_call_is_abandoned(job):
    broken, other = job.queued("a", (0, 2)), job.queued("c", (0, 1))
    job.numbers.update({((0, 2), "a"): 1, ((0, 1), "c"): 2})
    job.calls.start()

    def fail(requests):
        raise OSError("the link broke")

    job.link.completed = fail
    with pytest.raises(OSError, match="the link broke"):
        job.calls.advance()
    job.link.completed = job.arrived.issuperset
    job.arrived |= {"a 0", "c 0"}
    assert not job.calls.advance()
    assert not job.calls.has_abandoned_broken()
    job.calls.abandon(2, PeerLostError("rank 2 died"))
    assert job.calls.has_abandoned_broken()
    assert job.calls.advance()
    assert (broken.done, other.done) == (False, True)
