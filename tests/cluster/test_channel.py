"""An open connection, whose other end a test holds."""

import contextlib
import queue
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from tests.cluster.serving import DEADLINE
from tfdist.cluster import channel, messages
from tfdist.cluster.channel import Channel, RequestTimeoutError
from tfdist.cluster.messages import GetValue, JobOver, Ping, Reply
from tfdist.errors import PeerLostError, RendezvousError, TfdistError


class Ends:
    """A channel, the server's end of its connection, and what the channel tells."""

    def __init__(self, heartbeat):
        self.heard, self.failed = queue.SimpleQueue(), queue.SimpleQueue()
        self.channel = Channel("host:1", self.heard.put, lambda error, died: self.failed.put((error, died)), heartbeat)
        self.server, task = socket.socketpair()
        self._lines = self.server.makefile("rb")
        self.channel.open(task)

    def say(self, message):
        self.server.sendall(messages.encode(message))

    def hear(self):
        """The next message that is no sign of life."""
        while isinstance(message := messages.from_task(self._lines.readline()), Ping):
            pass
        return message

    def failure(self):
        return self.failed.get(timeout=DEADLINE)

    def close(self):
        self.channel.close()
        self._lines.close()
        self.server.close()


@pytest.fixture
def ends():
    with contextlib.closing(Ends(DEADLINE)) as made:
        yield made


def get(number):
    return GetValue(number, "key", wait=False)


def answered(ends, *values):
    """Answers so many requests, in the opposite order."""

    def answer():
        asked = [ends.hear() for _ in values]
        for message, value in zip(reversed(asked), reversed(values), strict=True):
            ends.say(Reply(message.id, value))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


def test_a_request_gets_its_own_reply(ends):
    got = queue.SimpleQueue()
    answering = answered(ends, "a", "b")
    ends.channel.ask(get, got.put)
    assert ends.channel.request(get, DEADLINE) == "b"
    assert got.get(timeout=DEADLINE) == "a"
    answering.join(DEADLINE)


def test_error_reply_raises_rendezvous_error(ends):
    ends.channel.ask(get, lambda value: None)
    ends.say(Reply(1, error="task 3 has failed"))
    with pytest.raises(RendezvousError, match="task 3 has failed"):
        ends.channel.request(get, DEADLINE)


def test_messages_other_than_replies_go_to_the_handler(ends):
    ends.say(Ping())
    ends.say(JobOver())
    assert [ends.heard.get(timeout=DEADLINE) for _ in range(2)] == [Ping(), JobOver()]


def test_requests_have_deadlines_and_end_with_a_failure(ends):
    with pytest.raises(RequestTimeoutError, match=r"no answer to GetValue.* within 0.05 s"):
        ends.channel.request(get, 0.05)
    ends.channel.failure = TfdistError("interrupted")
    with pytest.raises(TfdistError, match="interrupted"):
        ends.channel.request(get, DEADLINE)


def test_closed_connection_is_reported_as_lost_peer(ends):
    ends.server.shutdown(socket.SHUT_RDWR)
    error, died = ends.failure()
    assert isinstance(error, PeerLostError)
    assert "the rendezvous server at host:1 is gone" in str(error)
    assert died
    ends.channel.send(Ping())  # is lost


def test_an_invalid_message_ends_it_and_the_server_is_told(ends):
    ends.server.sendall(b"no JSON\n")
    error, died = ends.failure()
    assert "host:1 sent an invalid message (DecodeError" in str(error)
    assert not died
    assert isinstance(ends.hear(), messages.ReportFailure)


def test_a_silent_server_is_lost(monkeypatch):
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.02)
    with contextlib.closing(Ends(0.1)) as ends:
        error, died = ends.failure()
        assert "gave no sign of life for" in str(error)
        assert not died


def test_closing_is_no_failure(ends):
    ends.channel.close()
    with pytest.raises(queue.Empty):
        ends.failed.get(timeout=0.05)


def test_request_after_the_end_raises_at_once(ends):
    """The listener may not take the end for a failure, as the job is over."""
    ends.server.shutdown(socket.SHUT_RDWR)
    ends.failure()
    with pytest.raises(TfdistError, match="the job is over"):
        ends.channel.request(get, 10 * DEADLINE)


def test_silence_while_this_process_was_stopped_does_not_count(monkeypatch):
    """The server was stopped with it, as by Ctrl-Z, so that nothing has come when it goes on."""
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.02)
    stopped = []
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(stopped)))
    with contextlib.closing(Ends(DEADLINE)) as ends:
        assert isinstance(messages.from_task(ends._lines.readline()), Ping), "it has begun to watch"
        stopped.append(10 * DEADLINE)
        with pytest.raises(queue.Empty):
            ends.failed.get(timeout=0.3)
