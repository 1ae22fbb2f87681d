"""Pipelines over real processes."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess


def test_steps_have_the_gradients_of_the_whole_model():
    for end in harness.run([str(harness.PROGRAMS / "pipelined_step.py")], 3):
        assert "DONE" in end.output
    harness.assert_nothing_left()


def test_all_processes_get_the_recorded_timeline():
    first, second = harness.results(harness.run([str(harness.PROGRAMS / "pipeline_recorded.py")], 2))
    assert first == second
    assert 0 <= first["idle"] < 1
    harness.assert_nothing_left()
