"""A task's membership: its connection to a real server, or to another one, which a thread plays."""

import contextlib
import logging
import logging.handlers
import queue
import signal
import threading

import pytest

from tests.cluster.impostor import challenge, contact
from tests.cluster.serving import (
    DEADLINE,
    SECRET,
    Task,
    claims_of,
    connected,
    control,
    enter,
    enter_and_bind,
    serving,
)
from tfdist.cluster import messages, proof
from tfdist.cluster.channel import RequestTimeoutError
from tfdist.cluster.control import Watcher
from tfdist.cluster.messages import (
    CollectiveCall,
    GetValue,
    Invite,
    Join,
    Ping,
    RankStatus,
    Reply,
    Stalled,
    StandIn,
    Welcome,
)
from tfdist.errors import MismatchError, PeerLostError, RendezvousError, TfdistError


@pytest.fixture
def job():
    with serving(2) as server:
        yield server


def failure_of(client):
    """Why a task's job cannot go on, as soon as it knows."""
    failed = threading.Event()
    client.when_failed(lambda error: failed.set())
    assert failed.wait(DEADLINE)
    return client.failure


def raised(work):
    try:
        work()
    except TfdistError as error:
        return error


def on_all(controls, work):
    results = {}

    def run(rank):
        try:
            results[rank] = work(controls[rank], rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(controls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    return [results[rank] for rank in range(len(controls))]


# Getting in.


def test_all_ranks_wait_for_each_other():
    with serving(3) as job:
        controls = [control(job.address, rank) for rank in range(3)]
        try:
            assert on_all(controls, lambda task, rank: enter_and_bind(task, 3)) == [[0, 1, 2]] * 3
            assert {client.job for client in controls} == {job.server.job.name}
        finally:
            for client in controls:
                client.close()


def test_waiting_rank_raises_when_the_chief_dies_before_start():
    with serving(3) as job, contextlib.closing(control(job.address, 1)) as client:
        joining = []
        thread = threading.Thread(target=lambda: joining.append(raised(lambda: enter_and_bind(client, 3))))
        thread.start()
        with enter(job.address, 0) as chief:
            while chief.wait_for(messages.MissingTasks).tasks != ("worker 2 (host2:2222)",):
                pass
            job.chief_dies()
            thread.join(DEADLINE)
        assert isinstance(joining[0], RendezvousError)
        assert "the chief, died before the job started" in str(joining[0])


def test_refusals_are_logged_once_with_the_missing_tasks(job, caplog):
    with contextlib.closing(control(job.address, 0)) as chief:
        chief.enter()
        thread = threading.Thread(target=chief.bind, args=(0, 2))
        thread.start()
        for _ in range(2):
            with Task(job.address) as stranger:
                assert stranger.knock(claims_of(1), b"another").why
        with enter(job.address, 1) as other:
            other.say(messages.GatherValues(1, "bind", (0, 1), None, binds=True))
            thread.join(DEADLINE)
    refusals = [text for _, _, text in caplog.record_tuples if "refused" in text]
    assert refusals == [
        "tfdist: refused worker 1 (host1:2222) from 127.0.0.1 (wrong or missing secret); "
        "still waiting for worker 1 (host1:2222)"
    ]


# Asking.


def test_gather_orders_values_and_published_values_are_found(job):
    def work(client, rank):
        gathered = client.gather("places", {"rank": rank}, (1, 0))
        if rank == 0:
            client.publish("card", "of 0")
        client.barrier("put", (0, 1))
        return gathered, client.look_up("card")

    with connected(job.address) as controls:
        assert on_all(controls, work) == [([{"rank": 1}, {"rank": 0}], "of 0")] * 2


def test_a_value_is_waited_for(job):
    with connected(job.address) as (reader, publisher):
        values = []
        thread = threading.Thread(target=lambda: values.append(reader.look_up("address")))
        thread.start()
        publisher.publish("address", "tcp://127.0.0.1:5")
        thread.join(DEADLINE)
        assert values == ["tcp://127.0.0.1:5"]
        with pytest.raises(RequestTimeoutError):
            reader.look_up("nobody's", timeout=0.05)


def test_gather_with_a_failed_task_raises(job):
    with connected(job.address) as (client, _), enter_evaluator(job) as evaluator:
        evaluator.say(messages.ReportFailure("ValueError: no", mismatch=False))
        with pytest.raises(RendezvousError, match="evaluator 0, process 1000 on hostNone, failed: ValueError: no"):
            client.gather("values", None, (0, evaluator.number))


def test_concurrent_requests_get_their_own_replies(job):
    """Each gets the answer to its own question."""
    with connected(job.address) as (client, _):
        for number in range(20):
            client.publish(str(number), str(number))
        replies = on_all([client] * 20, lambda requester, number: requester.look_up(str(number)))
        assert replies == [str(number) for number in range(20)]


def test_ask_passes_the_reply_to_a_callback(job):
    answers, came = [], threading.Event()
    with connected(job.address) as (client, _):
        client.ask(
            lambda number: GetValue(number, "none", wait=False), lambda value: (answers.append(value), came.set())
        )
        assert came.wait(DEADLINE)
        assert answers == [None]


def alone(number):
    """A gather with a task that does not answer."""
    return messages.GatherValues(number, "alone", (0, 1), None)


def test_no_answer_in_time(job):
    words = "no answer to GatherValues.*'alone'.* within 0.05 s"
    with connected(job.address) as (client, _), pytest.raises(RequestTimeoutError, match=words):
        client.request(alone, timeout=0.05)


def test_late_callback_can_abort_a_request(job, monkeypatch):
    monkeypatch.setattr("tfdist.cluster.channel._LATE_SECONDS", 0.01)
    waited = []

    def late(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            raise TfdistError("enough")

    with connected(job.address) as (client, _), pytest.raises(TfdistError, match="enough"):
        client.request(alone, late=late)
    assert waited == sorted(waited)


# What became of the others.


def test_peer_death_fails_the_job_and_pending_requests(job):
    with contextlib.closing(control(job.address, 0)) as survivor:
        thread = threading.Thread(target=enter_and_bind, args=(survivor, 2))
        thread.start()
        with enter(job.address, 1) as other:
            other.say(messages.GatherValues(1, "bind", (0, 1), None, binds=True))
            thread.join(DEADLINE)
            assert survivor.failure is None
            asking = []
            waiting = threading.Thread(target=lambda: asking.append(raised(lambda: survivor.barrier("b", (0, 1)))))
            waiting.start()
            other.close()
        failure = failure_of(survivor)
        assert isinstance(failure, PeerLostError)
        assert survivor.peer_died
        assert str(failure) == (
            "rank 1, worker 1 (host1:2222), process 1001 on host1, died "
            "(its connection closed before its script had ended)."
        )
        waiting.join(DEADLINE)
        assert asking[0] is failure, "who waits for an answer is told"
        with pytest.raises(PeerLostError):
            survivor.barrier("another", (0, 1))


def test_reported_failure_fails_the_job_on_all_ranks(job):
    with connected(job.address) as (first, second):
        second.tell_failure(ValueError("no"))
        for client in (first, second):
            failure = failure_of(client)
            assert isinstance(failure, PeerLostError)
            assert str(failure).endswith("process 1001 on host1, failed: ValueError: no")
            assert not client.peer_died


def test_tfdist_error_is_forwarded_without_class_name_and_shortened(job):
    with connected(job.address) as (first, second):
        second.tell_failure(TfdistError("rank 1 waited. " + "x" * 2000))
        why = str(failure_of(first))
        assert "failed: rank 1 waited. xxx" in why
        assert len(why) < 1200, "it is cut"


def test_mismatch_error_reaches_all_ranks(job):
    with connected(job.address) as (first, second):
        first.tell_failure(MismatchError("ranks differ in sum"))
        for client in (first, second):
            failure = failure_of(client)
            assert isinstance(failure, MismatchError)
            assert str(failure) == "ranks differ in sum"


def test_the_first_reason_counts(job):
    with connected(job.address) as (client, _):
        client.fail(TfdistError("first"))
        client.fail(TfdistError("second"))
        assert str(client.failure) == "first"
        heard = []
        client.when_failed(lambda error: heard.append(str(error)))
        assert heard == ["first"], "at once"
        client.when_failed(None)
        client.fail(TfdistError("third"))
        assert heard == ["first"]


def test_all_ranks_leave_and_the_server_ends(job):
    with connected(job.address) as (first, second):
        second.leave(None, {0: 7})
        first.leave(None, {0: 7})
        on_all([first, second], lambda client, rank: client.end(DEADLINE))
        assert first._all_ended
        assert second._all_ended
        assert first.departed[1] == {0: 7}
        assert first.names[1].startswith("rank 1, worker 1")
        assert first.failure is None
    assert job.ends_by_itself()


def test_a_task_that_has_left_may_close_its_connection_at_once():
    """What it has not read by then does not lose its farewell."""
    with serving(1) as alone, contextlib.closing(control(alone.address, 0)) as first:
        first.enter()
        for number in range(30):
            evaluator = control(alone.address, None)
            evaluator.claims = claims_of(None, name=f"evaluator {number}")
            evaluator.enter()
            evaluator.leave(None, {}, DEADLINE)
            evaluator.close()
        first.gather("all before", None, (0,))
        assert len(first.departed) == 30


def test_leaving_with_an_error_fails_the_other_ranks(job):
    with connected(job.address) as (first, second):
        second.leave("KeyError: 'x'", {})
        assert str(failure_of(first)).endswith("failed: KeyError: 'x'")


def test_lost_server_is_reported_as_killed(job):
    with connected(job.address) as (client, _):
        job.close()
        assert "is gone: its process, on the chief's machine, was killed" in str(failure_of(client))
        assert client.peer_died
        client.send(Ping())  # what cannot be sent is lost


def admitted(then):
    """A server that admits everyone, and lets rank 0 start MPI."""

    def answer(connection, lines):
        connection.sendall(challenge())
        nonce = messages.hello(lines.readline()).nonce
        proven = proof.prove(SECRET, "server", ("n", nonce), [0, "j"])
        connection.sendall(messages.encode(Welcome(0, "j", proven)))
        gather = messages.from_task(lines.readline())
        connection.sendall(messages.encode(Reply(gather.id, [0])))
        then(connection, lines)

    return answer


@pytest.mark.parametrize("line", [b"no JSON\n", b'{"type": "jobfailed"}\n', b'{"type": "taskfinished", "task": 1}\n'])
def test_invalid_server_message_fails_the_job(line):
    heard, came = [], threading.Event()

    def then(connection, lines):
        connection.sendall(line)
        for said in lines:
            if not isinstance(message := messages.from_task(said), Ping):
                heard.append(message)
                came.set()

    with contact(admitted(then)) as client:
        enter_and_bind(client, 1)
        assert "sent an invalid message" in str(failure_of(client))
        assert came.wait(DEADLINE)
        assert isinstance(heard[0], messages.ReportFailure), "the others are told"


def test_a_silent_server_is_lost(monkeypatch):
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.02)
    pings = []

    def then(connection, lines):
        for line in lines:
            pings.append(messages.from_task(line))

    with contact(admitted(then), heartbeat=0.1) as client:
        enter_and_bind(client, 1)
        assert "gave no sign of life for" in str(failure_of(client))
    assert Ping() in pings


def test_ctrl_c_ends_the_job(job):
    """Noticed by the thread, whatever the main thread does."""
    with connected(job.address) as (first, second):
        assert first._channel._interrupts.active
        assert not second._channel._interrupts.active, "a process has one of them"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert str(failure_of(first)) == "interrupted (Ctrl-C)"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Tasks without a rank.


@contextlib.contextmanager
def enter_evaluator(job):
    with Task(job.address) as task:
        task.number = task.knock(claims_of(None, name="evaluator 0")).task
        yield task


class Events(Watcher):
    def __init__(self):
        self.events = queue.SimpleQueue()

    def came(self, task):
        self.events.put(("came", task))

    def lost(self, task, error):
        self.events.put(("lost", task, str(error)))

    def over(self):
        self.events.put(("over",))

    def next(self):
        return self.events.get(timeout=DEADLINE)


def test_the_death_of_a_task_without_a_rank_is_an_event(job):
    with connected(job.address) as (client, _):
        watcher = Events()
        client.watch(watcher)
        for _ in range(2):
            with enter_evaluator(job) as evaluator:
                assert watcher.next() == ("came", evaluator.number)
                assert client.present[evaluator.number] == "evaluator 0"
            kind, number, why = watcher.next()
            assert (kind, number) == ("lost", evaluator.number)
            assert why.startswith("evaluator 0, process 1000 on hostNone, died")
            assert evaluator.number not in client.present
        assert client.failure is None


def test_a_task_without_a_rank_outlives_the_job(job):
    evaluator = control(job.address, None)
    evaluator.claims = claims_of(None, name="evaluator 0")
    watcher = Events()
    evaluator.watch(watcher)
    with contextlib.closing(evaluator):
        evaluator.enter()
        assert watcher.next() == ("came", evaluator.task)
        with connected(job.address) as ranks:
            assert sorted(watcher.next() for _ in range(2)) == [("came", 0), ("came", 1)]
            for client in ranks:
                client.leave(None, {})
            on_all(ranks, lambda task, rank: task.end(DEADLINE))
        assert watcher.next() == ("over",)
        late = Events()
        evaluator.watch(late)
        assert late.next() == ("over",), "also who comes after it"
        assert job.ends_by_itself()
        assert evaluator.failure is None


def test_a_rank_that_is_lost_is_an_event_for_other_tasks(job):
    evaluator = control(job.address, None)
    evaluator.claims = claims_of(None, name="evaluator 0")
    watcher = Events()
    with contextlib.closing(evaluator):
        evaluator.enter()
        with connected(job.address) as (_, second):
            evaluator.watch(watcher)
            second.tell_failure(ValueError("no"))
            while (event := watcher.next())[0] != "lost":
                pass
        assert event[1] == 1
        assert event[2].endswith("failed: ValueError: no")
        assert evaluator.failure is None


# Collectives.


@pytest.mark.parametrize(("bound", "what_to_do"), [(False, "end it, and start the task again."), (True, "end it.")])
def test_resumed_process_learns_that_others_consider_it_lost(bound, what_to_do):
    """And not that the server is gone, which has closed the connection."""

    def then(connection, lines):
        why = "worker 0 gave no sign of life for 9 s: it is stopped."
        connection.sendall(messages.encode(messages.TaskLost(0, why, died=True, bound=bound)))

    with contact(admitted(then)) as client:
        enter_and_bind(client, 1)
        expected = f"it is stopped. The other tasks consider this process, task 0, lost: {what_to_do}"
        assert expected in str(failure_of(client))


class Listener:
    def __init__(self, control):
        self.control, self.heard, self.came = control, [], threading.Semaphore(0)

    def note(self, *what):
        self.heard.append(what)
        self.came.release()

    def state(self):
        self.note("report")
        return RankStatus((), {})

    def rank_joined(self):
        self.note("joined", dict(self.control.joined))

    def all_joined(self, last, counts):
        self.note("all joined", last, counts, dict(self.control.joined))

    def invited(self, invitation):
        self.note("invited", invitation.call.key)


@pytest.fixture
def logged():
    """What tfdist logs, in a queue."""
    records = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(records)
    logging.getLogger("tfdist").addHandler(handler)
    yield records
    logging.getLogger("tfdist").removeHandler(handler)


def test_attendant_receives_join_invite_and_stall_messages(job, logged):
    with connected(job.address) as controls:
        first, second = (Listener(participant) for participant in controls)
        for participant in (first, second):
            participant.control.attend(participant)
        second.control.send(Join({0: 2}))
        assert first.came.acquire(timeout=DEADLINE)
        first.control.send(Invite((1,), CollectiveCall("sum", 0, 2, None), StandIn("barrier")))
        for _ in range(2):
            assert second.came.acquire(timeout=DEADLINE)
        first.control.send(Stalled(60))
        for participant in (first, second):
            assert participant.came.acquire(timeout=DEADLINE)
        assert "a rank has waited for more than 60 s" in logged.get(timeout=DEADLINE).getMessage()
        first.control.send(Join({0: 3}))
        for participant in (first, second):
            assert participant.came.acquire(timeout=DEADLINE)
    joined = ("joined", {1: {0: 2}})
    assert first.heard == [joined, ("report",), ("all joined", 0, {0: 3}, {})]
    assert second.heard == [joined, ("invited", "sum"), ("report",), ("all joined", 0, {0: 3}, {})]
