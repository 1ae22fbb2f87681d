"""Forks of a process that has imported TensorFlow are what processes of their own would be."""

import json
import subprocess
import sys

import pytest

from tests.multiprocess import forking, harness

PROGRAM = str(harness.PROGRAMS / "forked.py")

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="all processes are new ones on other systems"),
]


def test_a_fork_is_as_a_new_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert forking.applies([PROGRAM], {"TEST_FORKED": "1"})
    per_rank = [{"TEST_END": "exit"}, {"TEST_END": "raise"}, {"TEST_END": "thread"}, {"TEST_END": "interrupt"}]
    with harness.started([PROGRAM, "an argument"], 4, {"TEST_FORKED": "1"}, per_rank) as processes:
        with pytest.raises(subprocess.TimeoutExpired):
            processes.popens[0].wait(0)
        (tmp_path / "go").touch()
        ended = processes.wait()
        outputs = processes.outputs()
    assert [end.code for end in ended] == [7, 1, 0, -2], outputs
    results = harness.results(ended)
    for rank, result in enumerate(results):
        assert result["arguments"] == [PROGRAM, "an argument"]
        assert result["folder"] == str(tmp_path)
        assert result["first on the path"] == str(harness.PROGRAMS)
        assert result["settings"] == {"TEST_END": per_rank[rank]["TEST_END"], "TEST_FORKED": "1"}
        assert result["task"] == rank
        assert result["leads a session"]
        assert result["MPI"] is False, "it is loaded by the program, under the settings of the program"
        assert ended[rank].output.splitlines()[-1] == "at the end", outputs
    for what in ("python", "numpy", "tensorflow", "keras"):
        assert len({json.dumps(result[what]) for result in results}) == 4, (
            f"{what} has equal random numbers in all processes"
        )
    assert results[0]["hash"] == results[2]["hash"] != results[1]["hash"], "of two parents"
    assert "ValueError: to be shown" in ended[1].output, outputs
    assert "the thread has ended" in ended[2].output, outputs
    assert "KeyboardInterrupt" in ended[3].output, outputs


def test_forking_does_not_apply_to_other_commands(tmp_path):
    assert not forking.applies([PROGRAM], {"PYTHONPATH": str(tmp_path)}), "read when Python starts"
    assert not forking.applies(["-c", "import keras"], {})
    assert not forking.applies([str(harness.PROGRAMS / "join.py")], {}), "it does without TensorFlow"
