"""Notices to users."""

import logging
import subprocess
import sys

import pytest

from tests.multiprocess import harness
from tfdist import notices


@pytest.fixture
def bare(monkeypatch):
    """Unconfigured logging, as in most scripts."""
    monkeypatch.setattr(notices.log, "hasHandlers", lambda: False)


def test_notice_goes_to_stderr_without_logging_setup(bare, capfd):
    notices.notice("tfdist: %d processes", 3)
    assert capfd.readouterr().err == "tfdist: 3 processes\n"


def test_notice_is_hidden_by_log_level(bare, capfd, monkeypatch):
    monkeypatch.setattr(notices.log, "level", logging.ERROR)
    notices.notice("tfdist: %d processes", 3)
    assert capfd.readouterr().err == ""


def test_notice_is_logged_as_info_with_logging_setup(caplog, capfd):
    with caplog.at_level(logging.INFO, "tfdist"):
        notices.notice("tfdist: %d processes", 3)
    assert caplog.record_tuples == [("tfdist", logging.INFO, "tfdist: 3 processes")]
    assert capfd.readouterr().err == ""


def test_what_is_said_once_is_said_once_with_the_same_arguments(caplog):
    with caplog.at_level(logging.INFO, "tfdist"):
        for name in ("a", "b", "a"):
            notices.notice_once("tfdist: notice of %s", name)
            notices.warn_once("tfdist: warning of %s", name)
    assert caplog.messages == [f"tfdist: {what} of {name}" for name in "ab" for what in ("notice", "warning")]


UNBUFFERED = """
import os, sys
from tfdist import notices

written = []
sys.stderr.buffer.write = lambda piece: written.append(bytes(piece)) or len(piece)
notices.notice("tfdist: %d processes", 3)
print(list(filter(None, written)))
"""


def test_notice_is_one_write_to_unbuffered_stream():
    said = subprocess.run(
        [sys.executable, "-u", "-c", UNBUFFERED], capture_output=True, text=True, timeout=harness.DEADLINE, check=True
    )
    assert said.stdout == "[b'tfdist: 3 processes\\n']\n"


SAYS = """
import tensorflow as tf
import logging
logging.basicConfig(level=logging.INFO)
tf.get_logger().setLevel(logging.INFO)
import tfdist
tfdist.AllReduceStrategy()
tf.get_logger().info("of MirroredStrategy, later")
"""


@pytest.mark.multiprocess
def test_number_of_processes_is_told_without_misleading_messages(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    ended = harness.run([str(tmp_path / "says.py")], 2)
    assert ended[0].output.count("tfdist: training on 2 processes on 1 host.") == 1
    assert "training on" not in ended[1].output
    for end in ended:
        assert "TF_CONFIG will be ignored" not in end.output
        assert "Using MirroredStrategy" not in end.output
        assert "of MirroredStrategy, later" in end.output


@pytest.mark.multiprocess
def test_number_of_processes_is_seen_by_default():
    ended = subprocess.run(
        [sys.executable, "-m", "tfdist", "run", "-n", "2", "-m", "tfdist", "doctor"],
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
        check=False,
    )
    assert "tfdist: training on 2 processes on 1 host." in ended.stderr
