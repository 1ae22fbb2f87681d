import pytest

from tests.cluster.serving import claims_of
from tfdist.cluster import messages, quorum_messages
from tfdist.cluster.messages import CollectiveCall, StandIn

CALL = CollectiveCall("sum #0", 3, 17, (0, 2), "kernel, bias")
STAND_IN = StandIn("sum", "float32", (12,), "ring")
FROM_TASK = [
    messages.Ping(),
    messages.PublishValue("ü", 'a"b\\\n'),
    messages.GetValue(1, "key", wait=True),
    messages.GatherValues(2, "name", (0, 1), {"any": [1, None]}, binds=True),
    messages.ScriptEnded(None, {0: 3}),
    messages.MPIShutDown(),
    messages.ReportFailure("why", mismatch=True, members=(0, 1)),
    messages.AgreeOnKey(3, "key", "float32 (3,)", None),
    messages.WaitingForCall(CALL, {3: 18}, is_alone=True),
    messages.Resumed(),
    messages.Stalled(60),
    messages.RankStatus((CALL,), {3: 18}),
    messages.Join({3: 18}),
    messages.Invite((1, 2), CALL, STAND_IN),
    quorum_messages.Enlist(4, "optimizer 0", "host0:1", -1, 2, 10.0, "settings"),
    quorum_messages.ReadyForRound(5, "optimizer 0", 7, 640, ends=True, fit=0, checksum=12),
    quorum_messages.ContributionsReceived(6, "optimizer 0", 3),
    quorum_messages.ContributionsMissing("optimizer 0", 3, (2,)),
    quorum_messages.ReplaceState(8, "optimizer 0"),
    quorum_messages.FetchEnded("optimizer 0"),
    quorum_messages.AskFirstEpoch(7, 0),
    quorum_messages.EpochReached(0, 3),
    quorum_messages.FitEnded(9, 0, ("optimizer 0",)),
]
FROM_SERVER = [
    messages.Ping(),
    messages.Reply(1, [None, 2]),
    messages.TaskPresent(1, "ps 0"),
    messages.MissingTasks(("worker 1",), ()),
    messages.TaskLost(1, "died", died=True, bound=False),
    messages.JobFailed("too late", mismatch=False),
    messages.TaskFinished(1, "worker 1", {}),
    messages.AllMPIShutDown(),
    messages.JobOver(),
    messages.StallReport("why", {1: "rank 1, worker 1,"}),
    messages.StatusRequest(),
    messages.RankJoined(1, {0: 1}),
    messages.AllJoined(2, {0: 3}),
    messages.Invited(CALL, STAND_IN),
    quorum_messages.MeetingAborted("optimizer 0", 3),
]


@pytest.mark.parametrize(
    ("decode", "message"),
    [(messages.from_task, message) for message in FROM_TASK]
    + [(messages.from_server, message) for message in FROM_SERVER]
    + [(messages.challenge, messages.Challenge(1, "n")), (messages.hello, messages.Hello(claims_of(0), "n", "p"))]
    + [(messages.answer, answer) for answer in (messages.Welcome(1, "job", "p"), messages.AdmissionRefused("why"))],
    ids=lambda value: type(value).__name__,
)
def test_message_is_encoded_as_one_line_and_decoded_equal(decode, message):
    line = messages.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize("union", [(messages.FromTask, FROM_TASK), (messages.FromServer, FROM_SERVER)])
def test_every_message_is_tested(union):
    kinds, examples = union
    assert {type(message) for message in examples} == set(kinds.__args__)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"3",
        b"{",
        b"\xff\xfe",
        b"{}",
        b'{"type": "unknown"}',
        b'{"type": "getvalue"}',
        b'{"type": "getvalue", "id": "1", "key": "a", "wait": true}',
        b'{"type": "stalled", "seconds": []}',
        b'{"type": "reply", "id": 1}',
    ],
)
def test_an_invalid_message_is_a_value_error(line):
    with pytest.raises(ValueError):  # noqa: PT011  (of msgspec, whose errors are ValueErrors)
        messages.from_task(line)
