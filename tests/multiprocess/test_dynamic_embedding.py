"""`DynamicEmbedding` on parameter servers, with real processes."""

import json

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "dynamic_embedding.py")


def test_users_and_items_are_embedded():
    ended = harness.tfdist("run", "-n", "2", "--ps", "2", "--output", "all", PROGRAM)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [json.loads(line.partition("RESULT ")[2]) for line in ended.stdout.splitlines() if "RESULT " in line]
    assert len(found) == 2, ended.stdout + ended.stderr
    for result in found:
        assert result["accuracy"] > 0.8, found
        assert result["steps"] == 6 * 40
        assert result["users"] == [60, True], "those of training and no others, from both servers"
        assert result["items"] == [80, True]
    harness.assert_nothing_left()
