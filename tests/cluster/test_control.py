"""A task's connection to a real server; servers that are none of ours are played by a thread."""

import contextlib
import json
import logging
import logging.handlers
import queue
import signal
import socket
import threading

import pytest

from tests.cluster.serving import (
    DEADLINE,
    DIGEST,
    SECRET,
    Task,
    claims_of,
    connected,
    control,
    enter,
    serving,
)
from tfdist.cluster import wire
from tfdist.cluster.control import RequestTimeoutError
from tfdist.errors import MismatchError, PeerLostError, RendezvousError, TfdistError


@pytest.fixture
def job():
    with serving(2) as server:
        yield server


def failure_of(one):
    """Why a task's job cannot go on, as soon as it knows."""
    failed = threading.Event()
    one.when_failed(lambda error: failed.set())
    assert failed.wait(DEADLINE)
    return one.failure


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


def test_all_learn_what_each_says_of_itself():
    with serving(3) as job:
        controls = [control(job.address, rank) for rank in range(3)]
        try:
            assert on_all(controls, lambda one, rank: one.join()) == [[claims_of(rank) for rank in range(3)]] * 3
            assert {one.job for one in controls} == {job.server.job.name}
        finally:
            for one in controls:
                one.close()


@pytest.mark.parametrize(
    ("secret", "digest", "words"),
    [
        (b"", DIGEST, "refused this task: wrong or missing secret: .* Set TFDIST_SECRET"),
        (b"another", DIGEST, "refused this task: wrong or missing secret"),
        (SECRET, "of another", "refused this task: another cluster spec"),
    ],
)
def test_refused(job, secret, digest, words):
    one = control(job.address, 0, secret)
    one._claims["digest"] = digest
    with contextlib.closing(one), pytest.raises(RendezvousError, match=words):
        one.join()


def test_two_tasks_of_one_index(job):
    with contextlib.closing(control(job.address, 0)) as second:
        words = "two tasks claim one index: .* already taken by process 1000"
        with enter(job.address, 0), pytest.raises(RendezvousError, match=words):
            second.join()


def test_who_waits_is_told_when_the_job_fails_before_its_start():
    with serving(3) as job, contextlib.closing(control(job.address, 1)) as one:
        joining = []
        thread = threading.Thread(target=lambda: joining.append(raised(one.join)))
        thread.start()
        with enter(job.address, 0) as chief:
            while chief.await_type("missing")["tasks"] != ["worker 2 (host2:2222)"]:
                pass
            job.chief_dies()
            thread.join(DEADLINE)
        assert isinstance(joining[0], RendezvousError)
        assert "the chief, died before the job started" in str(joining[0])


class Impostor:
    """Answers at an address in place of the job's server: each connection is handed to ``answer``."""

    def __init__(self, answer):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                self._answer(connection, connection.makefile("rb"))

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE)


@contextlib.contextmanager
def contact(answer, **timeouts):
    """A task's connection to an impostor."""
    server = Impostor(answer)
    with contextlib.closing(server), contextlib.closing(control(server.address, 0, **timeouts)) as one:
        yield one


def says(*messages):
    def answer(connection, lines):
        connection.sendall(messages[0])
        for message in messages[1:]:
            lines.readline()
            connection.sendall(message)
        lines.readline()

    return answer


def challenge(protocol=wire.PROTOCOL):
    return wire.encode({"tfdist": protocol, "nonce": "n"})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says(b"SSH-2.0-OpenSSH_9.2\r\n"), "is no rendezvous server of tfdist"),
        (says(b"x" * (wire.MAX_HANDSHAKE_LINE + 1)), "is no rendezvous server of tfdist"),
        (says(b"[1]\n"), "is no rendezvous server of tfdist"),
        (says(challenge(3)), "expected protocol 4, got 3"),
        (says(b"{}\n"), "expected protocol 4, got None"),
        (says(challenge(), wire.encode({"welcome": 0, "job": "j"})), "could not prove that it knows the job's secret"),
        (
            says(challenge(), wire.encode({"welcome": 0, "job": "j", "proof": "0" * 64})),
            "could not prove that it knows the job's secret",
        ),
    ],
)
def test_what_answers_is_not_this_jobs_server(answer, words):
    with contact(answer) as one, pytest.raises(RendezvousError, match=words):
        one.join()


def test_the_secret_does_not_cross_the_wire():
    heard = []

    def answer(connection, lines):
        connection.sendall(challenge())
        heard.append(lines.readline())

    with contact(answer, start=0.2) as one, pytest.raises(RendezvousError):
        one.join()
    assert heard
    for line in heard:
        assert set(json.loads(line)) == {"claims", "nonce", "proof"}
        assert SECRET not in line


def test_nobody_answers():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with contextlib.closing(control(address, 1, start=0.15)) as one:
        words = r"could not be reached within 0.15 s \(.*refused\). Missing: the chief"
        with pytest.raises(RendezvousError, match=words):
            one.join()


def test_a_server_that_closes_is_tried_again():
    """As a scheduler starts the chief again; the last reason is told."""
    connections = []

    def answer(connection, lines):
        connections.append(connection)

    words = r"within 0.35 s \(it closed the connection: "
    with contact(answer, start=0.35) as one, pytest.raises(RendezvousError, match=words):
        one.join()
    assert len(connections) >= 2


def test_refusals_and_who_is_missing_are_logged(job, caplog):
    with contextlib.closing(control(job.address, 0)) as one:
        thread = threading.Thread(target=one.join)
        thread.start()
        for _ in range(2):
            with Task(job.address) as stranger:
                assert "refused" in stranger.knock(claims_of(1), b"another")
        with enter(job.address, 1):
            thread.join(DEADLINE)
    refusals = [text for _, _, text in caplog.record_tuples if "refused" in text]
    assert refusals == [
        "tfdist: refused worker 1 (host1:2222) from 127.0.0.1 (wrong or missing secret); "
        "still waiting for worker 1 (host1:2222)"
    ]


# Asking.


def test_gather_barrier_and_values(job):
    def work(one, rank):
        gathered = one.all_gather("places", {"rank": rank})
        if rank == 0:
            one.send({"type": "put", "key": "card", "value": "of 0"})
        one.request("barrier", name="put")
        return gathered, one.request("get", key="card")["value"]

    with connected(job.address) as controls:
        assert on_all(controls, work) == [([{"rank": 0}, {"rank": 1}], "of 0")] * 2


def test_many_threads_ask_at_once(job):
    """Each gets the answer to its own question."""
    with connected(job.address) as (one, _):
        for number in range(20):
            one.send({"type": "put", "key": str(number), "value": number})
        found = on_all([one] * 20, lambda one, number: one.request("get", key=str(number))["value"])
        assert found == list(range(20))


def test_answers_to_a_callback(job):
    answers, came = [], threading.Event()
    with connected(job.address) as (one, _):
        one.ask(lambda answer: (answers.append(answer["value"]), came.set()), "get", key="none")
        assert came.wait(DEADLINE)
        assert answers == [None]


def test_no_answer_in_time(job):
    words = "no answer to 'barrier' {'name': 'alone'} within 0.05 s"
    with connected(job.address) as (one, _), pytest.raises(RequestTimeoutError, match=words):
        one.request("barrier", timeout=0.05, name="alone")


def test_a_late_answer_may_be_given_up(job, monkeypatch):
    monkeypatch.setattr("tfdist.cluster.control._LATE_SECONDS", 0.01)
    waited = []

    def late(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            raise TfdistError("enough")

    with connected(job.address) as (one, _), pytest.raises(TfdistError, match="enough"):
        one.request("barrier", late=late, name="alone")
    assert waited == sorted(waited)


# What became of the others.


def test_a_task_that_dies(job):
    with contextlib.closing(control(job.address, 0)) as one:
        thread = threading.Thread(target=one.join)
        thread.start()
        with enter(job.address, 1) as other:
            thread.join(DEADLINE)
            assert one.failure is None
            asking = []
            waiting = threading.Thread(target=lambda: asking.append(raised(lambda: one.request("barrier", name="b"))))
            waiting.start()
            other.close()
        failure = failure_of(one)
        assert isinstance(failure, PeerLostError)
        assert one.peer_died
        assert str(failure) == (
            "rank 1, worker 1 (host1:2222), process 1001 on host1, died "
            "(its connection closed before its script had ended)."
        )
        waiting.join(DEADLINE)
        assert asking[0] is failure, "who waits for an answer is told"
        with pytest.raises(PeerLostError):
            one.request("barrier", name="another")


def test_an_error_that_a_task_tells(job):
    with connected(job.address) as (first, second):
        second.tell_failure(ValueError("no"))
        for one in (first, second):
            failure = failure_of(one)
            assert isinstance(failure, PeerLostError)
            assert str(failure).endswith("process 1001 on host1, failed: ValueError: no")
            assert not one.peer_died


def test_an_error_of_tfdists_is_told_in_its_own_words(job):
    with connected(job.address) as (first, second):
        second.tell_failure(TfdistError("rank 1 waited. " + "x" * 2000))
        why = str(failure_of(first))
        assert "failed: rank 1 waited. xxx" in why
        assert len(why) < 1200, "it is cut"


def test_different_data(job):
    with connected(job.address) as (first, second):
        first.tell_failure(MismatchError("ranks differ in sum"))
        for one in (first, second):
            failure = failure_of(one)
            assert isinstance(failure, MismatchError)
            assert str(failure) == "ranks differ in sum"


def test_the_first_reason_counts(job):
    with connected(job.address) as (one, _):
        one.fail(TfdistError("first"))
        one.fail(TfdistError("second"))
        assert str(one.failure) == "first"
        heard = []
        one.when_failed(lambda error: heard.append(str(error)))
        assert heard == ["first"], "at once"
        one.when_failed(None)
        one.fail(TfdistError("third"))
        assert heard == ["first"]


def test_farewell(job):
    with connected(job.address) as (first, second):
        second.leave(None, {"0": 7})
        first.leave(None, {"0": 7})
        on_all([first, second], lambda one, rank: one.end(DEADLINE))
        assert first._all_ended
        assert second._all_ended
        assert first.departed[1] == {"0": 7}
        assert first.names[1].startswith("rank 1, worker 1")
        assert first.failure is None
    assert job.ends_by_itself()


def test_a_script_that_ends_with_an_error(job):
    with connected(job.address) as (first, second):
        second.leave("KeyError: 'x'", {})
        assert str(failure_of(first)).endswith("failed: KeyError: 'x'")


def test_the_server_goes(job):
    with connected(job.address) as (one, _):
        job.close()
        assert "is gone: its process, on the chief's machine, was killed" in str(failure_of(one))
        assert one.peer_died
        one.send({"type": "ping"})  # what cannot be sent is lost


def admitted(then):
    """A server that lets everyone in, and starts the job."""

    def answer(connection, lines):
        connection.sendall(challenge())
        nonce = wire.decode(lines.readline())["nonce"]
        welcome = {"welcome": 0, "job": "j"}
        connection.sendall(
            wire.encode({**welcome, "proof": wire.prove(SECRET, "server", ("n", nonce), welcome)})
            + wire.encode({"type": "start", "claims": [claims_of(0)]})
        )
        then(connection, lines)

    return answer


@pytest.mark.parametrize("line", [b"no JSON\n", b'{"type": "failed"}\n', b'{"type": "left", "rank": 1}\n'])
def test_what_no_server_says_ends_the_job(line):
    heard, came = [], threading.Event()

    def then(connection, lines):
        connection.sendall(line)
        for said in lines:
            if (message := wire.decode(said))["type"] != "ping":
                heard.append(message)
                came.set()

    with contact(admitted(then)) as one:
        one.join()
        assert "sent what this task does not understand" in str(failure_of(one))
        assert came.wait(DEADLINE)
        assert heard[0]["type"] == "fails", "the others are told"


def test_a_silent_server_is_lost(monkeypatch):
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.02)
    pings = []

    def then(connection, lines):
        for line in lines:
            pings.append(wire.decode(line))

    with contact(admitted(then), heartbeat=0.1) as one:
        one.join()
        assert "gave no sign of life for" in str(failure_of(one))
    assert {"type": "ping"} in pings


def test_ctrl_c_ends_the_job(job):
    """Noticed by the thread, whatever the main thread does."""
    with connected(job.address) as (one, other):
        assert one._interrupts.active
        assert not other._interrupts.active, "a process has one of them"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert str(failure_of(one)) == "interrupted (Ctrl-C)"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Collectives.


class Listener:
    def __init__(self, control):
        self.control, self.heard, self.came = control, [], threading.Semaphore(0)

    def note(self, *what):
        self.heard.append(what)
        self.came.release()

    def state(self):
        self.note("report")
        return {"under_way": [], "counts": {}}

    def rank_joined(self):
        self.note("joined", dict(self.control.joined))

    def all_joined(self, last):
        self.note("all joined", last, dict(self.control.joined))

    def invited(self, call):
        self.note("invited", call["key"])


@pytest.fixture
def logged():
    """What tfdist logs, in a queue."""
    records = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(records)
    logging.getLogger("tfdist").addHandler(handler)
    yield records
    logging.getLogger("tfdist").removeHandler(handler)


def test_what_is_said_of_collectives(job, logged):
    with connected(job.address) as controls:
        first, second = (Listener(one) for one in controls)
        for one in (first, second):
            one.control.attend(one)
        second.control.send({"type": "join", "counts": {"0": 2}})
        assert first.came.acquire(timeout=DEADLINE)
        first.control.send({"type": "invite", "to": [1], "key": "sum", "number": 0, "call": 2, "stand_in": {}})
        for _ in range(2):
            assert second.came.acquire(timeout=DEADLINE)
        first.control.send({"type": "stalled", "seconds": 60})
        for one in (first, second):
            assert one.came.acquire(timeout=DEADLINE)
        assert "a rank has waited for more than 60 s" in logged.get(timeout=DEADLINE).getMessage()
        first.control.send({"type": "join", "counts": {"0": 3}})
        for one in (first, second):
            assert one.came.acquire(timeout=DEADLINE)
    joined = ("joined", {1: {"0": 2}})
    assert first.heard == [joined, ("report",), ("all joined", 0, {})]
    assert second.heard == [joined, ("invited", "sum"), ("report",), ("all joined", 0, {})]
