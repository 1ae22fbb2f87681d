"""The rendezvous server over real connections; its tasks send message by message what a test wants."""

import contextlib
import re

import pytest

from tests.cluster.serving import SECRET, Task, bind, claims_of, enter, serving
from tfdist.cluster import messages, proof
from tfdist.cluster.messages import (
    AdmissionRefused,
    AllMPIShutDown,
    CollectiveCall,
    GatherValues,
    GetValue,
    JobFailed,
    JobOver,
    MissingTasks,
    MPIShutDown,
    Ping,
    PublishValue,
    RankStatus,
    ReportFailure,
    ScriptEnded,
    Stalled,
    StallReport,
    StatusRequest,
    TaskFinished,
    TaskLost,
    TaskPresent,
    Welcome,
)

RANK_1 = "rank 1, worker 1 (host1:2222), process 1001 on host1,"


@pytest.fixture
def job():
    with serving(2) as server:
        yield server


@contextlib.contextmanager
def entered(server, *numbers):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(enter(server.address, number)) for number in numbers]


@contextlib.contextmanager
def bound(server, size=2):
    """All ranks of a job, which depend on each other."""
    with entered(server, *range(size)) as tasks:
        bind(tasks)
        yield tasks


def with_roles(**settings):
    """A job of two workers, a parameter server and an evaluator, which are tasks 2 and 3."""
    tasks = ("worker 0 (a:1)", "worker 1 (b:1)", "ps 0 (c:1)", "evaluator 0 (d:1)")
    return serving(2, **{"tasks": tasks, **settings})


def still_serves(task):
    task.say(GetValue(77, "nothing", wait=False))
    assert task.reply(77) is None


# Admitting tasks.


def test_tasks_are_told_which_tasks_are_present(job):
    with entered(job, 1, 0) as (second, first):
        assert first.wait_for(TaskPresent) == TaskPresent(1, "worker 1 (host1:2222)")
        assert first.wait_for(TaskPresent) == TaskPresent(0, "worker 0 (host0:2222)")
        assert [second.wait_for(TaskPresent).task for _ in range(2)] == [1, 0]


def test_ranks_are_bound_once_all_gather_with_binds(job):
    with enter(job.address, 1) as second:
        assert second.wait_for(MissingTasks) == MissingTasks(("worker 0 (host0:2222)",), ())
        second.say(GatherValues(5, "bind", (0, 1), "of 1", binds=True))
        with enter(job.address, 0) as first:
            still_serves(first)
            assert not job.server.bound
            first.say(GatherValues(5, "bind", (0, 1), "of 0", binds=True))
            for task in (first, second):
                assert task.reply(5) == ["of 0", "of 1"]
            still_serves(first)
            assert job.server.bound == {0, 1}


def test_the_server_proves_itself_too(job):
    with Task(job.address) as task:
        answer = task.knock(claims_of(0))
        proven = proof.prove(SECRET, "server", task.nonces, [0, job.server.job.name])
        assert answer == Welcome(0, job.server.job.name, proven)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        (claims_of(0, version="0.0.1"), "another tfdist version: the chief runs"),
        (claims_of(0, digest="of another"), "another cluster spec: .* worker 0 .host0:2222., worker 1 .host1:2222."),
        (claims_of(2), "no such task: expected a number from 0 to 1, got 2"),
        (claims_of(-1), "no such task"),
        (claims_of(None, name="worker 7"), "not in the cluster: the chief's cluster does not list worker 7"),
        (claims_of(1), "two tasks claim one index: worker 1 .* is already taken by process 1001 on host1"),
    ],
)
def test_invalid_claims_are_refused_and_reported_once(job, claims, words):
    with enter(job.address, 1) as member:
        with Task(job.address) as task:
            assert re.match(words, task.knock(claims).why)
            assert task.hear() is None, "the connection stays"
        while not (told := member.wait_for(MissingTasks).refused):
            pass
        assert len(told) == 1


def test_refusal_without_the_secret_reveals_nothing(job):
    """The proof is of the claims that are made and of this connection's challenge, and it comes before all else."""
    wrong = claims_of(7, version="0", digest="")
    with enter(job.address, 1) as member:
        for secret, claims, proven in [
            (b"", claims_of(0), None),
            (SECRET, claims_of(0), claims_of(1)),
            (b"another", wrong, None),
        ]:
            with Task(job.address) as task:
                refused = task.knock(claims, secret, proven).why
                assert refused.startswith("wrong or missing secret")
                assert "worker" not in refused
        while len(refusals := member.wait_for(MissingTasks).refused) < 2:
            pass
        assert refusals == (
            "worker 0 (host0:2222) from 127.0.0.1 (wrong or missing secret)",
            "a task from 127.0.0.1 (wrong or missing secret)",
        ), "one line a task, however often it comes"


def test_proof_of_another_connection_is_refused(job):
    with Task(job.address) as task, Task(job.address) as listener:
        task.knock(claims_of(0))
        listener.line()
        proven = proof.prove(SECRET, "task", task.nonces, claims_of(1))
        listener.say(messages.Hello(claims_of(1), task.nonces[1], proven))
        assert "wrong or missing secret" in messages.answer(listener.line()).why


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"[]\n",
        b'{"type": "hello", "claims": 3, "nonce": "", "proof": ""}\n',
        b'{"type": "hello", "claims": {"task": "0"}, "nonce": "", "proof": ""}\n',
        b"\xff\n",
        b"x" * (1 << 14),
    ],
)
def test_invalid_hello_is_not_answered(job, line):
    with Task(job.address) as stranger:
        assert messages.challenge(stranger.line()).tfdist == messages.PROTOCOL
        stranger.socket.sendall(line)
        assert stranger.hear() is None
    with bound(job):
        pass


def test_a_rank_that_dies_before_the_start_may_come_again():
    with serving(3) as job, enter(job.address, 1) as second:
        with enter(job.address, 0):
            while second.wait_for(MissingTasks).tasks != ("worker 2 (host2:2222)",):
                pass
        while second.wait_for(MissingTasks).tasks != ("worker 0 (host0:2222)", "worker 2 (host2:2222)"):
            pass
        with entered(job, 0, 2) as (first, third):
            assert bind([first, second, third]) == [[0, 1, 2]] * 3


def test_no_rank_can_be_replaced_after_the_start():
    with serving(3) as job, bound(job, 3) as (first, _, third):
        third.say(MPIShutDown())
        third.close()
        # The first task is told nothing of it; that the server knows shows in its answer to who comes again.
        while True:
            with Task(job.address) as again:
                refused = again.knock(claims_of(2)).why
            if not refused.startswith("two tasks claim"):
                break
        assert refused.startswith("too late: the job has started, and worker 2 (host2:2222) has left it already.")
        still_serves(first)


def test_missing_tasks_fail_the_job_after_start_timeout(monkeypatch):
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.01)
    with serving(3, start_timeout=0.05) as job, enter(job.address, 1) as task:
        with Task(job.address) as stranger:
            stranger.knock(claims_of(0), b"another")
        task.say(GatherValues(1, "bind", (0, 1, 2), None, binds=True))
        failed = task.wait_for(JobFailed)
        assert not failed.mismatch
        assert failed.why.startswith(
            "1 of 3 tasks came within 0.05 s. Missing: worker 0 (host0:2222), worker 2 (host2:2222). "
        )
        with enter(job.address, 0) as late:
            assert late.wait_for(JobFailed) == failed, "who comes later is told at once"


def test_start_timeout_does_not_run_before_a_rank_waits(monkeypatch):
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.01)
    with serving(2, start_timeout=0.05) as job, enter(job.address, 1) as task:
        for _ in range(20):
            task.say(Ping())
            task.wait_for(Ping)
        assert job.server.failure is None


def test_rank_that_never_starts_mpi_fails_the_job(monkeypatch):
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.01)
    with serving(2, start_timeout=0.05) as job, entered(job, 0, 1) as (first, second):
        first.say(GatherValues(1, "bind", (0, 1), None, binds=True))
        assert "not all of the 2 tasks started MPI within 0.05 s" in second.wait_for(JobFailed).why


def test_chief_death_before_the_start_fails_the_job(job):
    with enter(job.address, 1) as task:
        job.chief_dies()
        assert task.wait_for(JobFailed).why == "worker 0 (host0:2222), the chief, died before the job started."
    assert job.ends_by_itself()


def test_server_ends_when_chief_dies_before_any_task_enters(job):
    job.chief_dies()
    assert job.ends_by_itself()


# Keeping watch.


@pytest.mark.parametrize("left", [False, True])
def test_dead_rank_is_reported_lost_with_its_progress(job, left):
    with bound(job) as (first, second):
        if left:
            second.say(ScriptEnded(None, {0: 3}))
            assert first.wait_for(TaskFinished) == TaskFinished(1, RANK_1, {0: 3})
        second.close()
        when = "after its script had ended, before MPI was finalized" if left else "before its script had ended"
        lost = first.wait_for(TaskLost)
        assert lost == TaskLost(1, f"{RANK_1} died (its connection closed {when}).", died=True, bound=True)
    assert job.ends_by_itself(), "nobody is left"


def test_a_silent_task_is_lost(monkeypatch):
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.02)
    with serving(2, heartbeat_timeout=0.1) as job, bound(job) as (first, second):
        while isinstance(message := first.hear(), (Ping, TaskPresent, MissingTasks)):
            first.say(Ping())
        assert (message.task, message.died) == (1, True)
        assert "gave no sign of life for" in message.why
        assert second.wait_for(TaskLost) == message


def test_silence_of_all_tasks_counts_as_no_loss(monkeypatch):
    """Ctrl-Z: all are silent, for as long as it lasts."""
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.02)
    with serving(2, heartbeat_timeout=0.1) as job, bound(job) as (first, _):
        for _ in range(20):
            first.wait_for(Ping)
        assert not job.server.lost


@pytest.mark.parametrize("line", [b"no JSON\n", b'{"type": "getvalue"}\n', b'{"type": "stalled", "seconds": []}\n'])
def test_a_task_that_sends_an_invalid_message_is_lost(job, line):
    with bound(job) as (first, second):
        second.socket.sendall(line)
        assert first.wait_for(TaskLost).task == 1
        while second.hear() is not None:
            pass


def test_server_ends_after_all_ranks_leave(job):
    with bound(job) as (first, second):
        first.say(ScriptEnded(None, {}))
        first.say(MPIShutDown())
        second.wait_for(TaskFinished)
        second.say(ScriptEnded(None, {}))
        second.say(MPIShutDown())
        for task in (first, second):
            task.wait_for(AllMPIShutDown)
    assert job.ends_by_itself()
    assert not job.server.lost


def test_a_task_that_fails_is_the_cause(job):
    with bound(job) as (first, second):
        second.say(ReportFailure("ValueError: no", mismatch=False))
        assert first.wait_for(TaskLost) == TaskLost(1, f"{RANK_1} failed: ValueError: no", died=False, bound=True)
        first.say(ReportFailure("because of the other", mismatch=False))
        still_serves(second)


def test_leaving_with_an_error_is_reported_as_failure(job):
    with bound(job) as (first, second):
        second.say(ScriptEnded("ValueError: no", {}))
        assert first.wait_for(TaskLost).why.endswith("process 1001 on host1, failed: ValueError: no")


def test_a_rank_that_fails_before_the_start_is_not_waited_for(job):
    with entered(job, 0, 1) as (first, second):
        first.say(GatherValues(1, "bind", (0, 1), None, binds=True))
        second.say(ScriptEnded("MPIUnavailableError: no MPI", {}))
        assert first.reply(1).error == f"{RANK_1} failed: MPIUnavailableError: no MPI"


def test_different_data_are_told_to_the_members_of_the_group():
    with serving(3) as job, bound(job, 3) as (first, second, third):
        first.say(ReportFailure("ranks differ", mismatch=True, members=(0, 1)))
        for task in (first, second):
            assert task.wait_for(JobFailed) == JobFailed("ranks differ", mismatch=True)
        third.say(GetValue(1, "nothing", wait=False))
        while not isinstance(message := third.hear(), messages.Reply):
            assert not isinstance(message, JobFailed)


# Other roles.


def test_a_task_without_a_rank_dies_and_comes_back():
    with with_roles() as job, enter(job.address, 3) as evaluator, bound(job) as (first, second):
        evaluator.close()
        for task in (first, second):
            why = "evaluator 0 (d:1), process 1003 on host3, died (its connection closed before its script had ended)."
            assert task.wait_for(TaskLost) == TaskLost(3, why, died=True, bound=False)
        with enter(job.address, 3) as again:
            assert first.wait_for(TaskPresent) == TaskPresent(3, "evaluator 0 (d:1)")
            still_serves(again)
        assert not job.server.lost


def test_a_task_without_a_rank_may_leave_at_any_time():
    with with_roles() as job, enter(job.address, 2) as ps, bound(job) as (first, _):
        ps.say(ScriptEnded(None, {}))
        first.wait_for(TaskFinished)
        ps.close()
        first.say(GatherValues(1, "alone", (0,), None))
        while not isinstance(message := first.hear(), messages.Reply):
            assert not isinstance(message, TaskLost)


def test_other_roles_are_told_when_all_ranks_have_ended():
    with with_roles() as job, entered(job, 2, 3) as (ps, evaluator):
        with bound(job) as ranks:
            for task in ranks:
                task.say(ScriptEnded(None, {}))
                task.say(MPIShutDown())
            for task in ranks:
                task.wait_for(AllMPIShutDown)
        for task in (ps, evaluator):
            task.wait_for(JobOver)
            while task.hear() is not None:
                pass
        assert job.ends_by_itself()


def test_job_starts_after_other_roles_came_and_went():
    with with_roles() as job:
        with enter(job.address, 3):
            pass
        with bound(job) as (first, _):
            still_serves(first)


def test_lost_worker_of_an_elastic_job_can_be_replaced():
    with with_roles(is_elastic=True) as job, entered(job, 0, 1, 2) as (chief, worker, ps):
        worker.close()
        lost = chief.wait_for(TaskLost)
        assert (lost.task, lost.bound) == (1, False)
        with enter(job.address, 1) as again, enter(job.address, None, name="worker 7") as new:
            while ps.wait_for(TaskPresent).name != "worker 7":
                pass
            still_serves(again)
            still_serves(new)
        with Task(job.address) as same:
            answer = same.knock(claims_of(None, name="worker 7"))
            while isinstance(answer, AdmissionRefused):  # until the server knows that it has gone
                with Task(job.address) as same:
                    answer = same.knock(claims_of(None, name="worker 7"))
            assert answer.task == 4, "the number of its name"


def test_the_failure_of_a_task_is_told_once():
    """By an elastic job, too, whose tasks report an error, and then that their scripts have ended with it."""
    with with_roles(is_elastic=True) as job, entered(job, 0, 1) as (chief, worker):
        worker.say(ReportFailure("ValueError: no", mismatch=False))
        worker.say(ScriptEnded("ValueError: no", {}))
        still_serves(worker)
        assert chief.wait_for(TaskLost).why.endswith("failed: ValueError: no")
        worker.close()
        with enter(job.address, 1):
            assert isinstance(chief.wait_for((TaskLost, TaskPresent)), TaskPresent)


def test_an_elastic_job_waits_for_its_chief():
    with with_roles(is_elastic=True) as job, enter(job.address, 2) as ps:
        with enter(job.address, 0):
            pass
        job.chief_dies()
        assert ps.wait_for(TaskLost).task == 0
        with enter(job.address, 0) as again:
            still_serves(again)
            again.say(ScriptEnded(None, {}))
        ps.wait_for(JobOver)
    assert job.ends_by_itself()


def test_elastic_job_ends_once_its_chief_has_left():
    with with_roles(is_elastic=True) as job, entered(job, 0, 2) as (chief, ps):
        with enter(job.address, 1):
            pass
        assert chief.wait_for(TaskLost).task == 1
        chief.say(ScriptEnded(None, {}))
        chief.close()
        ps.wait_for(JobOver)
    assert job.ends_by_itself()


def test_an_elastic_job_does_not_wait_for_ever():
    with with_roles(is_elastic=True, start_timeout=0.05) as job, enter(job.address, 2) as ps:
        with enter(job.address, 0):
            pass
        ps.wait_for(JobOver)
    assert job.ends_by_itself()


# Requests.


def test_get_returns_published_value_or_none(job):
    with bound(job) as (first, second):
        first.say(GetValue(1, "card", wait=False))
        assert first.reply(1) is None
        second.say(GetValue(1, "card", wait=True))
        first.say(PublishValue("card", "ü"))
        assert second.reply(1) == "ü"


def test_a_barrier_has_no_reply_before_all_have_come(job):
    with bound(job) as (first, second):
        first.say(GatherValues(1, "b", (0, 1), None))
        first.say(GetValue(2, "x", wait=False))
        assert first.wait_for(messages.Reply).id == 2, "the reply to the later request comes first"
        second.say(GatherValues(1, "b", (0, 1), None))
        for task in (first, second):
            assert task.reply(1) == [None, None]


def test_message_of_one_mebibyte_is_received(job):
    """Longer than before the handshake's end, and than what is read at once."""
    value = "x" * (1 << 20)
    with bound(job) as (first, second):
        first.say(PublishValue("long", value))
        for task in (first, second):
            task.say(GetValue(1, "long", wait=True))
            assert task.reply(1) == value


def test_a_stall_is_explained_to_all(job):
    with bound(job) as (first, second):
        first.say(Stalled(60))
        for task in (first, second):
            task.wait_for(StatusRequest)
        first.say(RankStatus((CollectiveCall("sum", 0, 2, None),), {0: 3}))
        second.say(RankStatus((), {0: 2}))
        for task in (first, second):
            report = task.wait_for(StallReport)
            assert "rank 0 has posted sum (call 3); missing: rank 1." in report.why
            assert list(report.late) == [1]
        second.say(Stalled(60))  # a moment later
        for task in (first, second):
            task.say(GetValue(1, "nothing", wait=False))
            while not isinstance(message := task.hear(), messages.Reply):
                assert not isinstance(message, StatusRequest), "it has just been explained"
