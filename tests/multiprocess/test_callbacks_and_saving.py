"""Callbacks and saving on two processes, each with a folder of its own."""

import re

import pytest

from tests.multiprocess import harness

PROGRAM = harness.PROGRAMS / "callbacks_and_saving.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", PROGRAM.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    with harness.started([str(PROGRAM), str(tmp_path_factory.mktemp("ranks"))], 2) as processes:
        ended = processes.wait()
        return ended, processes.outputs()


@pytest.mark.multiprocess
@pytest.mark.parametrize("index", range(len(CHECKS)), ids=CHECKS)
def test_check(index, output):
    ended, text = output
    following = [f"CHECK {CHECKS[index + 1]}" if index + 1 < len(CHECKS) else "DONE"]
    for end in ended:
        assert following[0] in end.output, text
