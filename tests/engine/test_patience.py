"""Reports of a long wait to the server, and its end; tests pass the elapsed time."""

import msgspec
import pytest

from tfdist.cluster.messages import CollectiveCall, Resumed, Stalled, StallReport, StandIn, WaitingForCall
from tfdist.cluster.settings import Timeouts
from tfdist.engine.operations import Operation
from tfdist.engine.patience import STANDING_SECONDS, WaitMonitor
from tfdist.engine.pending import Pending
from tfdist.errors import CollectiveTimeoutError, PeerLostError, TfdistError

STANDING = WaitingForCall(CollectiveCall("sum", 4, 2, None), {4: 3}, is_alone=True)


class Connection:
    """The parts of the control connection that a wait reads, and the messages that it sends."""

    def __init__(self):
        self.failure, self.departed, self.joined, self.names, self.sent = None, {}, {}, {}, []
        self.stall = None

    def send(self, message):
        self.sent.append(message)

    def kinds(self):
        return [type(message) for message in self.sent]


@pytest.fixture
def control():
    return Connection()


def patience(control, number=4, call=2, members=None, stand_in=None, standing=lambda: STANDING, **timeouts):
    pending = Pending("sum", members)
    pending.number, pending.call, pending.operation = number, call, Operation(None, stand_in)
    return WaitMonitor(0, control, Timeouts(**timeouts), pending, members or (0, 1, 2), standing)


def test_blocked_rank_reports_standing_once(control):
    wait = patience(control)
    wait.check(STANDING_SECONDS / 2)
    assert control.sent == []
    wait.check(STANDING_SECONDS * 1.5)
    wait.check(STANDING_SECONDS * 3)
    assert control.sent == [STANDING]
    wait.over()
    assert control.kinds() == [WaitingForCall, Resumed]


def test_report_that_is_not_true_any_more_is_replaced_and_withdrawn(control):
    later = msgspec.structs.replace(STANDING, counts={4: 3, 5: 1})
    reports = [STANDING, later, later, None, STANDING]
    wait = patience(control, standing=lambda: reports.pop(0))
    for seconds in (1.5, 2.5, 2.7, 3.5, 4.5):
        wait.check(seconds)
    assert control.sent == [STANDING, later, Resumed()]
    wait.check(30.0)
    wait.over()
    assert control.sent == [STANDING, later, Resumed(), STANDING, Resumed()]


def test_rank_that_does_not_stand_still_is_not_reported(control):
    wait = patience(control, standing=lambda: None)
    wait.check(30.0)
    wait.over()
    assert control.sent == []


def test_short_wait_is_not_reported(control):
    wait = patience(control)
    wait.check(STANDING_SECONDS / 2)
    wait.over()
    assert control.sent == []


def test_stall_is_reported_once_per_interval(control):
    wait = patience(control, standing=lambda: None, stall=10)
    for seconds in (5, 11, 12, 19, 21, 29, 31):
        wait.check(seconds)
    assert control.sent == [Stalled(seconds) for seconds in (10, 20, 30)]


def test_wait_beyond_the_deadline_raises_timeout_with_the_late_ranks(control):
    wait = patience(control, members=(0, 1, 2), collective=100, stall=200)
    wait.check(99)
    control.stall = StallReport("long ago", {2: "rank 2, worker 2,"})
    wait.check(101)
    assert control.sent[-1] == Stalled(100)
    wait.check(102)
    assert control.sent.count(Stalled(100)) == 1
    control.stall = StallReport("now", {0: "rank 0,", 1: "rank 1, worker 1,", 3: "rank 3,"})
    words = r"waited 100 s in sum in group \[0, 1, 2\] \(call 3\), in which rank 1, worker 1, did not take part"
    with pytest.raises(CollectiveTimeoutError, match=words):
        wait.check(103)


def test_wait_ends_although_the_server_does_not_explain_it(control):
    wait = patience(control, collective=100)
    wait.check(101)
    with pytest.raises(CollectiveTimeoutError, match=r"\(call 3\), in which other ranks did not take part"):
        wait.check(110)


def test_the_jobs_failure_counts_before_all_else(control):
    control.failure = PeerLostError("rank 1 died")
    control.departed[1], control.names[1] = {}, "rank 1"
    with pytest.raises(PeerLostError) as caught:
        patience(control, collective=1).check(5.0)
    assert caught.value is control.failure
    assert control.sent == []


def test_an_evaluator_that_ends_is_not_waited_for(control):
    """An evaluator has a number beyond the ranks, which alone take part."""
    control.departed[3], control.names[3] = {}, "evaluator 0"
    patience(control).check(0.1)
    patience(control, number=None).check(0.1)


@pytest.mark.parametrize(
    ("number", "members", "counts", "missing"),
    [
        (4, None, {4: 2}, True),  # it made calls 0 and 1, and is missing from call 2
        (4, None, {4: 3}, False),
        (4, None, {5: 9}, True),
        (4, None, {}, True),
        (4, (0, 2), {}, False),
        (4, (0, 1), {}, True),
        (None, None, {4: 9}, True),  # it has not agreed on the key, and will not
        (None, (0, 2), {}, False),
    ],
)
def test_waiting_for_an_ended_rank_raises(control, number, members, counts, missing):
    control.departed[1], control.names[1] = counts, "rank 1, worker 1,"
    wait = patience(control, number=number, members=members)
    if not missing:
        wait.check(0.1)
        return
    words = r"rank 0 waits in sum.* \(call 3\), but rank 1, worker 1, has ended its script without it"
    with pytest.raises(PeerLostError, match=words):
        wait.check(0.1)


@pytest.mark.parametrize(
    ("number", "members", "counts", "stand_in", "missing"),
    [
        (4, None, {4: 2}, None, True),
        (4, None, {4: 3}, None, False),
        (4, (0, 2), {4: 2}, None, False),
        (4, None, {4: 2}, StandIn("barrier"), False),  # it is invited, and stands in
        (None, None, {}, None, False),  # the server agrees without it, and then it is known what it lacks
    ],
)
def test_waiting_for_a_joined_rank_without_stand_in_raises(control, number, members, counts, stand_in, missing):
    control.joined[1] = counts
    wait = patience(control, number=number, members=members, stand_in=stand_in)
    if not missing:
        wait.check(0.1)
        return
    with pytest.raises(PeerLostError, match=r"rank 0 waits in sum, but rank 1 has called join.*TFDIST_MACHINE_CODE=0"):
        wait.check(0.1)


def test_failed_wait_reports_its_end_to_the_server(control):
    """A rank whose script catches the error is no longer reported as waiting."""
    wait = patience(control)
    wait.check(2.0)
    control.failure = TfdistError("interrupted (Ctrl-C)")
    with pytest.raises(TfdistError):
        wait.check(2.1)
    wait.over()
    assert control.kinds() == [WaitingForCall, Resumed]
