import os
import select
import signal
import subprocess

import pytest

from tfdist.cli.process import Process
from tfdist.cluster import launcher


@pytest.fixture
def process():
    """A process that has no end of its own, and the end on which it says how it came to fail."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    popen = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield Process("rank 2", popen, reading), writing
    popen.kill()
    popen.wait()
    os.close(reading)
    os.close(writing)


def test_each_report_is_returned_once(process):
    launched, writing = process
    assert launched.said() == set()
    os.write(writing, b"a victim\nthe cause\n")
    assert launched.said() == {launcher.VICTIM, launcher.CAUSE}
    assert launched.said() == set()


def test_undecodable_report_raises_no_error(process):
    launched, writing = process
    os.write(writing, b"\xff\xfe\n")
    assert len(launched.said()) == 1


def test_signals_reach_the_children_too(process):
    """A shell that has started the script: both are of one group."""
    popen = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    child = int(popen.stdout.readline())
    launched = Process("rank 0", popen, process[0].report)
    descriptor = os.pidfd_open(child)
    launched.signal(signal.SIGKILL)
    assert popen.wait(30) == -signal.SIGKILL
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(30_000), "the child lives"
    os.close(descriptor)
    launched.signal(signal.SIGKILL)  # nobody is there any more
    popen.stdout.close()
