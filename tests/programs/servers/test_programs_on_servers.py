"""Programs as users write them come to their end on parameter servers, learn, and leave all workers the same model."""

import json

import pytest

from tests.multiprocess import harness

RUNNER = harness.PROGRAMS.parents[1] / "programs" / "servers" / "runner.py"
PROGRAMS = ("tutorial", "vae", "ctc", "distillation", "text_generation")


@pytest.mark.multiprocess
def test_programs_train_on_servers(tmp_path):
    arguments = ("run", "-n", "2", "--ps", "1", "--output", "all", str(RUNNER), str(tmp_path), *PROGRAMS)
    ended = harness.tfdist(*arguments, TEST_FOLDER=str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "RESULT " in line]
    found = [json.loads(line.partition("RESULT ")[2]) for line in lines]
    for name in PROGRAMS:
        one, other = [result for result in found if result["name"] == name]
        assert one["sums"] == other["sums"], f"{name}: the workers' weights differ"
        assert one["updates"] == other["updates"], name
        assert all(one["updates"]), f"{name}: no server has made an update"
        for losses in zip(one["losses"], other["losses"], strict=True):
            assert sum(own[-1] for own in losses) < sum(own[0] for own in losses), f"{name}: {losses}"
    harness.assert_nothing_left()
