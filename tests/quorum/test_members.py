"""What tasks ask of a rendezvous server, over real connections."""

import contextlib
import threading

import pytest

from tests.cluster.serving import control, serving
from tfdist.cluster.quorum_messages import Enlisted, MeetingOutcome, Partner
from tfdist.cluster.settings import Timeouts
from tfdist.errors import MismatchError, RendezvousError, TfdistError
from tfdist.quorum.links import Links
from tfdist.quorum.members import ClusterMembers, SingleProcessMembers

GRACE = 0.5


@contextlib.contextmanager
def together(size, quorum=1, start=10.0):
    """The members of a job, each with a connection of its own to a server."""
    with serving(size, is_elastic=True) as server, contextlib.ExitStack() as stack:
        made = []
        for task in range(size):
            connection = control(server.address, task, start=start)
            connection.enter()
            stack.callback(connection.close)
            links = Links(task, "127.0.0.1", None)
            stack.callback(links.close)
            made.append(ClusterMembers(connection, links, quorum, GRACE, Timeouts(start=start)))
        yield made


def test_members_enlist_meet_and_agree_on_outcome():
    with together(2) as (first, second):
        assert first.enlist("a", -1, "alike", True) == Enlisted(0, None, "")
        assert second.enlist("a", -1, "alike", True) == Enlisted(0, 0, first.links.address)
        assert second.enlist("a", 0, "alike", True).source is None
        first.reach(0, 4)
        first.fit = second.fit = 0
        assert second.epoch_of(0) == 4
        results = {}

        def work(member):
            meeting = member.ready("a", 1, 5 + member.task, ends=False, checksum=0)
            results[member.task] = meeting, member.have("a", meeting.attempt)

        threads = [threading.Thread(target=work, args=(member,)) for member in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        partners = tuple(Partner(task, 5 + task, member.links.address) for task, member in enumerate((first, second)))
        for meeting, outcome in results.values():
            assert meeting.partners == partners
            assert outcome == MeetingOutcome(True)
        assert second.others == 4
        assert not first.is_aborted("a", 1)


def test_reported_lack_aborts_the_meeting():
    with together(2) as (first, second):
        first.enlist("a", -1, "alike", True)
        second.enlist("a", -1, "alike", True)
        second.enlist("a", 0, "alike", True)
        thread = threading.Thread(target=lambda: second.ready("a", 1, 1, ends=False, checksum=0))
        thread.start()
        meeting = first.ready("a", 1, 1, ends=False, checksum=0)
        thread.join(100)
        first.lacks("a", meeting.attempt, [1])
        with first.links.arrived:
            assert first.links.arrived.wait_for(lambda: first.is_aborted("a", meeting.attempt), 10)
        assert first.have("a", meeting.attempt) == MeetingOutcome(False)


def test_missing_quorum_raises_after_timeout():
    with together(1, quorum=2, start=0.5) as (member,):
        member.enlist("a", -1, "alike", True)
        with pytest.raises(
            RendezvousError, match=r"task 0 has waited for a quorum of 2 task\(s\) for round 1 of a for 0.5 s"
        ):
            member.ready("a", 1, 1, ends=False, checksum=0)


def test_other_settings_are_an_error():
    with together(2) as (first, second):
        first.enlist("a", -1, "alike", True)
        with pytest.raises(MismatchError, match=r"task 1 has .* others; the others have .* alike"):
            second.enlist("a", -1, "others", True)


@pytest.mark.parametrize("fails", [False, True])
def test_fetch_ends_when_the_source_is_lost(fails):
    """Also when it waits for an answer, which a process that was killed never gives."""
    with together(2) as (first, second):
        first.enlist("a", -1, "alike", True)
        reply = second.enlist("a", -1, "alike", True)
        first.links.close()
        results = []

        def work():
            try:
                results.append(second.fetch(reply.source, reply.address, "a"))
            except TfdistError as error:
                results.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        if fails:
            second._control.fail(TfdistError("it is over"))
        else:
            first._control.close()
        thread.join(20)
        assert results == ["it is over" if fails else None]
        if not fails:
            assert second.enlist("a", -1, "alike", True) == Enlisted(0, None, "")


def test_waiting_member_raises_failure_of_the_job():
    with together(1) as (member,):
        member._control.fail(TfdistError("it is over"))
        with pytest.raises(TfdistError, match="it is over"):
            member.is_aborted("a", 1)
        assert str(member.failure) == "it is over"


def test_a_process_alone_meets_itself():
    alone = SingleProcessMembers()
    assert alone.enlist("a", -1, "", True) == Enlisted(0, None, "")
    meeting = alone.ready("a", 3, 7, ends=True, checksum=0)
    assert meeting.partners == (Partner(0, 7, ""),)
    assert alone.have("a", meeting.attempt).counts
    assert alone.epoch_of(0) == 0
    assert not alone.is_aborted("a", 1)
    with pytest.raises(TfdistError, match="no links"):
        _ = alone.links
