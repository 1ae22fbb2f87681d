"""The rendezvous server over real connections; its tasks say byte by byte what a test wants them to."""

import contextlib
import re

import pytest

from tests.cluster.serving import SECRET, Task, claims_of, enter, serving
from tfdist.cluster import wire


@pytest.fixture
def job():
    with serving(2) as server:
        yield server


@contextlib.contextmanager
def all_in(server, size=2):
    """All tasks of a job that has started."""
    with contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(enter(server.address, rank)) for rank in range(size)]
        for task in tasks:
            task.await_type("start")
        yield tasks


# Letting tasks in.


def test_the_job_starts_when_all_are_there(job):
    with enter(job.address, 1) as second:
        missing = second.await_type("missing")
        assert (missing["tasks"], missing["refused"]) == (["worker 0 (host0:2222)"], [])
        with enter(job.address, 0) as first:
            for task in (first, second):
                assert task.await_type("start")["claims"] == [claims_of(0), claims_of(1)]


def test_the_server_proves_itself_too(job):
    with Task(job.address) as task:
        answer = task.knock(claims_of(0))
        proof = answer.pop("proof")
        assert answer == {"welcome": 0, "job": job.server.job.name}
        assert proof == wire.prove(SECRET, "server", task.nonces, answer)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        (claims_of(0, version="0.0.1"), "another tfdist version: the chief runs"),
        (claims_of(0, version=None), "another tfdist version"),
        (claims_of(0, digest="of another"), "another cluster spec: .* worker 0 .host0:2222., worker 1 .host1:2222."),
        (claims_of(2), "no such rank: expected 0 to 1, got 2"),
        (claims_of(-1), "no such rank"),
        (claims_of("0"), "no such rank"),
        (claims_of(None), "no such rank"),
        (claims_of(1), "two tasks claim one index: worker 1 .* is already taken by process 1001 on host1"),
    ],
)
def test_refusals(job, claims, words):
    with enter(job.address, 1) as member:
        with Task(job.address) as task:
            assert re.match(words, task.knock(claims)["refused"])
            assert task.hear() is None, "the connection stays"
        while not (told := member.await_type("missing")["refused"]):
            pass
        assert len(told) == 1


def test_without_the_secret_nobody_learns_anything(job):
    """The proof is of the claims that are made and of this connection's challenge, and it comes before all else."""
    wrong = claims_of(7, version="0", digest="")
    with enter(job.address, 1) as member:
        for secret, claims, proven in [
            (b"", claims_of(0), None),
            (SECRET, claims_of(0), claims_of(1)),
            (b"another", wrong, None),
        ]:
            with Task(job.address) as task:
                refused = task.knock(claims, secret, proven)["refused"]
                assert refused.startswith("wrong or missing secret")
                assert "worker" not in refused
        while len(refusals := member.await_type("missing")["refused"]) < 2:
            pass
        assert refusals == [
            "worker 0 (host0:2222) from 127.0.0.1 (wrong or missing secret)",
            "a task from 127.0.0.1 (wrong or missing secret)",
        ], "one line a task, however often it comes"


def test_an_old_proof_is_worth_nothing(job):
    with Task(job.address) as task, Task(job.address) as listener:
        task.knock(claims_of(0))
        listener.hear()
        proof = wire.prove(SECRET, "task", task.nonces, claims_of(1))
        listener.say(claims=claims_of(1), nonce=task.nonces[1], proof=proof)
        assert "wrong or missing secret" in listener.hear()["refused"]


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[]\n", b'{"claims": 3}\n', b"\xff\n", b"x" * (1 << 14)]
)
def test_strangers_are_not_answered(job, line):
    with Task(job.address) as stranger:
        assert stranger.hear()["tfdist"] == wire.PROTOCOL
        stranger.socket.sendall(line)
        assert stranger.hear() is None
    with all_in(job):
        pass


def test_a_task_that_goes_before_the_start_may_come_again():
    with serving(3) as job, enter(job.address, 1) as second:
        with enter(job.address, 0):
            while second.await_type("missing")["tasks"] != ["worker 2 (host2:2222)"]:
                pass
        while second.await_type("missing")["tasks"] != ["worker 0 (host0:2222)", "worker 2 (host2:2222)"]:
            pass
        with enter(job.address, 0) as first, enter(job.address, 2):
            first.await_type("start")


def test_nobody_comes_in_after_the_start():
    with serving(3) as job, all_in(job, 3) as (first, _, third):
        third.say(type="end")
        third.close()
        # The first task is told nothing of it; that the server knows shows in its answer to who comes again.
        while True:
            with Task(job.address) as again:
                refused = again.knock(claims_of(2))["refused"]
            if not refused.startswith("two tasks claim"):
                break
        assert refused == "too late: the job has started, and worker 2 (host2:2222) has left it already."
        first.say(type="get", key="x", id=0)
        first.await_answer(0)


def test_too_few_came(monkeypatch):
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.01)
    with serving(3, start_timeout=0.05) as job, enter(job.address, 1) as task:
        with Task(job.address) as stranger:
            stranger.knock(claims_of(0), b"another")
        failed = task.await_type("failed")
        assert (failed["kind"], failed["rank"], failed["died"]) == ("lost", None, False)
        assert failed["why"].startswith(
            "1 of 3 tasks came within 0.05 s. Missing: worker 0 (host0:2222), worker 2 (host2:2222). "
        )
        with enter(job.address, 0) as late:
            assert late.hear() == failed, "who comes later is told at once"


def test_the_chief_dies_before_the_start(job):
    with enter(job.address, 1) as task:
        job.chief_dies()
        failed = task.await_type("failed")
        assert failed["why"] == "worker 0 (host0:2222), the chief, died before the job started."
        assert failed["rank"] == 0
    assert job.ends_by_itself()


def test_the_chief_dies_before_anyone_comes(job):
    job.chief_dies()
    assert job.ends_by_itself()


# Keeping watch.


@pytest.mark.parametrize("left", [False, True])
def test_a_task_that_dies(job, left):
    with all_in(job) as (first, second):
        if left:
            second.say(type="leave", counts={"0": 3})
            assert first.await_type("left") == {
                "type": "left",
                "rank": 1,
                "name": "rank 1, worker 1 (host1:2222), process 1001 on host1,",
                "counts": {"0": 3},
            }
        second.close()
        failed = first.await_type("failed")
        assert (failed["kind"], failed["rank"], failed["died"]) == ("lost", 1, True)
        when = "after its script had ended, before MPI had" if left else "before its script had ended"
        name = "rank 1, worker 1 (host1:2222), process 1001 on host1,"
        assert failed["why"] == f"{name} died (its connection closed {when})."
    assert job.ends_by_itself(), "nobody is left"


def test_a_silent_task_is_lost(monkeypatch):
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.02)
    with serving(2, heartbeat_timeout=0.1) as job, all_in(job) as (first, second):
        while (message := first.hear())["type"] == "ping":
            first.say(type="ping")
        assert (message["type"], message["rank"], message["died"]) == ("failed", 1, True)
        assert "gave no sign of life for" in message["why"]
        assert second.await_type("failed") == message


def test_a_job_that_is_stopped_as_a_whole_has_lost_nobody(monkeypatch):
    """Ctrl-Z: all are silent, for as long as it lasts."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.02)
    with serving(2, heartbeat_timeout=0.1) as job, all_in(job) as (first, _):
        assert [first.hear()["type"] for _ in range(20)] == ["ping"] * 20


@pytest.mark.parametrize("line", [b"no JSON\n", b'{"type": "get"}\n', b'{"type": "stalled", "seconds": []}\n'])
def test_a_task_that_says_what_no_task_says_is_lost(job, line):
    with all_in(job) as (first, second):
        second.socket.sendall(line)
        assert first.await_type("failed")["rank"] == 1
        while second.hear() is not None:
            pass


def test_all_leave_in_good_order(job):
    with all_in(job) as (first, second):
        first.say(type="leave", counts={})
        first.say(type="end")
        second.await_type("left")
        second.say(type="leave", counts={})
        second.say(type="end")
        for task in (first, second):
            task.await_type("all ended")
    assert job.ends_by_itself()
    assert job.server.failure is None


def test_a_task_that_fails_is_the_cause(job):
    with all_in(job) as (first, second):
        second.say(type="fails", why="ValueError: no", mismatch=False)
        failed = first.await_type("failed")
        assert failed["why"] == "rank 1, worker 1 (host1:2222), process 1001 on host1, failed: ValueError: no"
        assert (failed["kind"], failed["died"]) == ("lost", False)
        first.say(type="fails", why="because of the other", mismatch=False)
        first.say(type="get", key="x", id=5)
        first.await_answer(5)
        assert job.server.failure["rank"] == 1, "the first cause counts"


def test_a_script_that_ended_with_an_error(job):
    with all_in(job) as (first, second):
        second.say(type="leave", failed="ValueError: no", counts={})
        failed = first.await_type("failed")
        assert failed["why"].endswith("process 1001 on host1, failed: ValueError: no")


def test_different_data_are_told_as_such(job):
    with all_in(job) as (first, second):
        first.say(type="fails", why="ranks differ", mismatch=True)
        failed = second.await_type("failed")
        assert (failed["kind"], failed["why"]) == ("mismatch", "ranks differ")


# What tasks ask for.


def test_values(job):
    with all_in(job) as (first, second):
        first.say(type="get", key="card", id=1)
        assert first.await_answer(1)["value"] is None
        first.say(type="put", key="card", value="ü")
        first.say(type="get", key="card", id=2)
        assert first.await_answer(2)["value"] == "ü"
        second.say(type="get", key="card", id=1)
        assert second.await_answer(1)["value"] == "ü"


def test_gathers_are_told_apart_by_their_names(job):
    with all_in(job) as (first, second):
        first.say(type="gather", name="a", value={"x": 1}, id=10)
        first.say(type="gather", name="b", value=None, id=11)
        second.say(type="gather", name="b", value=[2], id=20)
        second.say(type="gather", name="a", value="s", id=21)
        for task, a, b in ((first, 10, 11), (second, 21, 20)):
            answers = {answer["re"]: answer["values"] for answer in (task.await_answer(), task.await_answer())}
            assert answers == {a: [{"x": 1}, "s"], b: [None, [2]]}


def test_a_barrier_has_no_answer_before_all_have_come(job):
    with all_in(job) as (first, second):
        first.say(type="barrier", name="b", id=1)
        first.say(type="get", key="x", id=2)
        assert first.await_answer()["re"] == 2, "the answer to the later question comes first"
        for _ in range(2):  # a name can be used again
            second.say(type="barrier", name="b", id=1)
            first.await_answer(1)
            second.await_answer(1)
            first.say(type="barrier", name="b", id=1)


def test_a_long_message_of_a_task(job):
    """Longer than a stranger's may be, and than what is read at once."""
    value = "x" * (1 << 20)
    with all_in(job) as (first, second):
        first.say(type="put", key="long", value=value)
        first.say(type="get", key="long", id=1)
        assert first.await_answer(1)["value"] == value
        second.say(type="get", key="long", id=1)
        assert second.await_answer(1)["value"] == value


def test_a_stall_is_explained_to_all(job):
    with all_in(job) as (first, second):
        first.say(type="stalled", seconds=60)
        under_way = {"key": "sum", "number": 0, "call": 2, "members": None, "contents": ""}
        for task in (first, second):
            task.await_type("report")
        first.say(type="state", under_way=[under_way], counts={"0": 3})
        second.say(type="state", under_way=[], counts={"0": 2})
        for task in (first, second):
            why = task.await_type("stall")["why"]
            assert "rank 0 has posted sum (call 3); missing: rank 1." in why
