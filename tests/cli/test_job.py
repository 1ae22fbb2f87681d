"""What a job makes of what its processes say; `test_run.py` has whole runs."""

import os
import select
import signal
import socket
import subprocess

import pytest

from tfdist.cli import job
from tfdist.cli.job import Job, Process
from tfdist.cluster import launcher


@pytest.fixture
def process():
    """A process that has no end of its own, and the end on which it says how it came to fail."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    popen = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield Process(2, popen, reading), writing
    popen.kill()
    popen.wait()
    os.close(reading)
    os.close(writing)


def test_what_is_said_is_heard_once(process):
    one, writing = process
    assert one.said() == set()
    os.write(writing, b"a victim\nthe cause\n")
    assert one.said() == {launcher.VICTIM, launcher.CAUSE}
    assert one.said() == set()


def test_what_is_no_text_is_no_error(process):
    one, writing = process
    os.write(writing, b"\xff\xfe\n")
    assert len(one.said()) == 1


def test_a_victim_stays_one(process):
    one, writing = process
    causes = []
    os.write(writing, b"a victim\n")
    assert job._hear(one, causes)
    assert not job._hear(one, causes)
    assert one.is_victim
    assert causes == []


def test_a_cause_is_noted_once(process):
    one, writing = process
    causes = []
    for _ in range(2):
        os.write(writing, b"the cause\n")
        assert job._hear(one, causes)
    assert causes == [one]
    assert not one.is_victim


def test_signals_reach_the_children_too(process):
    """A shell that has started the script: both are of one group."""
    popen = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    child = int(popen.stdout.readline())
    one = Process(0, popen, process[0].report)
    descriptor = os.pidfd_open(child)
    one.signal(signal.SIGKILL)
    assert popen.wait(30) == -signal.SIGKILL
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(30_000), "the child lives"
    os.close(descriptor)
    one.signal(signal.SIGKILL)  # nobody is there any more
    popen.stdout.close()


def test_ports_are_different_and_free():
    ports = job._free_ports(20)
    assert len(set(ports)) == 20
    for port in ports[:3]:
        socket.create_server(("127.0.0.1", port)).close()


def ended(command, rank=1, **known):
    popen = subprocess.Popen(["sh", "-c", command])
    popen.wait(30)
    return Process(rank, popen, -1, **known)


@pytest.mark.parametrize(
    ("command", "how", "code"),
    [("exit 7", "exited with code 7", 7), ("kill -TERM $$", "was killed by SIGTERM", 128 + 15)],
)
def test_the_code_of_who_is_to_blame_is_the_jobs(capfd, command, how, code):
    one = ended(command)
    assert Job(["true"], 3, False, False)._report([one]) == code
    said = f"tfdist run: rank 1 (process {one.popen.pid}) {how}; the other processes were ended.\n"
    assert capfd.readouterr().err == said


def test_alone_there_are_no_others(capfd):
    Job(["true"], 1, False, False)._report([ended("exit 1", rank=0)])
    assert capfd.readouterr().err.endswith("exited with code 1.\n")


def test_who_had_to_be_ended_gives_the_code_of_who_ended_by_it(capfd):
    """The code of a process that was killed by the launcher says nothing."""
    still, victim = ended("kill -KILL $$", ended_by_us=True), ended("exit 5", rank=0, is_victim=True)
    assert Job(["true"], 2, False, False)._report([still, victim]) == 5
    assert "stood still, or failed and did not end by itself" in capfd.readouterr().err
    assert Job(["true"], 2, False, False)._report([still]) == 1
