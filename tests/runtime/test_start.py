"""What is said at MPI's start; `tests/multiprocess/test_start.py` starts it."""

import subprocess
import sys
import textwrap

import pytest

from tfdist.comm.probe import Sharing
from tfdist.runtime import start


def run(script):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )


def test_an_initialization_that_does_not_end_ends_the_process():
    ended = run("""
        import threading
        from tfdist.cluster.settings import Timeouts
        from tfdist.runtime import start

        with start._initialization(None, Timeouts(start=0.1)):
            threading.Event().wait()
    """)
    assert ended.returncode == 1
    assert "tfdist: MPI's initialization failed: MPI did not start within 0.1 s." in ended.stderr


def test_initialization_in_time_cancels_the_deadline():
    ended = run("""
        import threading
        from tfdist.cluster.settings import Timeouts
        from tfdist.runtime import start

        with start._initialization(None, Timeouts(start=0.1)):
            pass
        for thread in threading.enumerate():
            if thread.name == "tfdist-initialization":
                thread.join(100)
        print("goes on")
    """)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr


@pytest.fixture
def told(caplog, monkeypatch):
    """What is logged, when something is not shared."""
    monkeypatch.setattr(start, "simulates_hosts", lambda: False)
    caplog.set_level("INFO", "tfdist")

    def tell(sharing):
        caplog.clear()
        start._say_what_is_not_shared(sharing)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return tell


def test_ranks_with_shared_memory_log_nothing(told):
    assert told(Sharing(nodes=[0, 0], arenas=[0, 0], sums=[True, True], cells=None, reasons=[])) == []


def test_ranks_without_shared_memory_log_a_warning(told):
    reasons = [(0, 1, "they are in other containers"), (0, 2, "x"), (1, 2, "y")]
    ((level, message),) = told(Sharing(nodes=[0, 1, 2], arenas=[0, 1, 2], sums=[True] * 3, cells=None, reasons=reasons))
    assert level == "WARNING"
    assert "no memory between rank 0 and rank 1 (and 2 more such pairs)" in message
    assert "they are in other containers. They communicate over TCP, which is slower." in message


def test_unshared_small_messages_are_logged_as_info(told):
    ((level, message),) = told(
        Sharing(nodes=[0, 1], arenas=[0, 0], sums=[True, True], cells=None, reasons=[(0, 1, "why")])
    )
    assert level == "INFO"
    assert message.endswith("Their small messages go over TCP.")
