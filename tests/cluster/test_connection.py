"""A task's handshake with a real server, and with others, which a thread plays."""

import contextlib
import json
import socket
import threading

import pytest

from tests.cluster.impostor import challenge, contact, says
from tests.cluster.serving import DIGEST, SECRET, claims_of, control, enter, serving
from tfdist.cluster import messages
from tfdist.cluster.messages import Welcome
from tfdist.errors import RendezvousError


@pytest.fixture
def job():
    with serving(2) as server:
        yield server


@pytest.mark.parametrize(
    ("secret", "digest", "words"),
    [
        (b"", DIGEST, "refused this task: wrong or missing secret: .* Set TFDIST_SECRET"),
        (b"another", DIGEST, "refused this task: wrong or missing secret"),
        (SECRET, "of another", "refused this task: another cluster spec"),
    ],
)
def test_refused_task_raises_with_the_reason(job, secret, digest, words):
    client = control(job.address, 0, secret)
    client.claims = claims_of(0, digest=digest)
    with contextlib.closing(client), pytest.raises(RendezvousError, match=words):
        client.enter()


def test_two_tasks_of_one_index(job):
    with contextlib.closing(control(job.address, 0)) as second:
        words = "two tasks claim one index: .* already taken by process 1000"
        with enter(job.address, 0), pytest.raises(RendezvousError, match=words):
            second.enter()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says(b"SSH-2.0-OpenSSH_9.2\r\n"), "is not a rendezvous server of tfdist"),
        (says(b"x" * (messages.MAX_HANDSHAKE_LINE + 1)), "is not a rendezvous server of tfdist"),
        (says(b"[1]\n"), "is not a rendezvous server of tfdist"),
        (says(challenge(4)), "expected protocol 11, got 4"),
        (says(b"{}\n"), "is not a rendezvous server of tfdist"),
        (says(challenge(), messages.encode(Welcome(0, "j"))), "could not prove that it knows the job's secret"),
        (
            says(challenge(), messages.encode(Welcome(0, "j", "0" * 64))),
            "could not prove that it knows the job's secret",
        ),
    ],
)
def test_invalid_or_unproven_server_answer_raises(answer, words):
    with contact(answer) as client, pytest.raises(RendezvousError, match=words):
        client.enter()


def test_the_secret_does_not_cross_the_wire():
    heard = []

    def answer(connection, lines):
        connection.sendall(challenge())
        heard.append(lines.readline())

    with contact(answer, start=1.0) as client, pytest.raises(RendezvousError):
        client.enter()
    assert heard
    for line in heard:
        assert set(json.loads(line)) == {"type", "claims", "nonce", "proof"}
        assert SECRET not in line


def test_unreachable_server_raises_after_start_timeout():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with contextlib.closing(control(address, 1, start=0.15)) as client:
        words = r"could not be reached within 0.15 s \(.*refused\). Missing: the chief"
        with pytest.raises(RendezvousError, match=words):
            client.enter()


def test_a_byte_now_and_again_does_not_prolong_the_wait():
    ends = threading.Event()

    def answer(connection, lines):
        while not ends.wait(0.001):
            connection.sendall(b"x")

    with contact(answer, start=0.3) as client:
        with pytest.raises(RendezvousError, match=r"within 0.3 s \(the handshake failed: timed out\)"):
            client.enter()
        ends.set()


def test_failed_handshake_is_retried_until_start_timeout():
    """As a scheduler starts the chief again; the last reason is told."""
    connections = []

    def answer(connection, lines):
        connections.append(connection)

    words = r"within 0.35 s \(the handshake failed: "
    with contact(answer, start=0.35) as client, pytest.raises(RendezvousError, match=words):
        client.enter()
    assert len(connections) >= 2
