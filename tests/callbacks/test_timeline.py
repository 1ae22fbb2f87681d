"""In a process alone; `tests/multiprocess/test_observing.py` has several."""

import json

import pytest

import tfdist
from tests.callbacks.fitting import fit


def test_the_timeline_is_written_at_the_end(tmp_path):
    path = tmp_path / "timeline.json"
    model = fit(tfdist.callbacks.Timeline(path))
    written = json.loads(path.read_text())
    assert isinstance(written["traceEvents"] if isinstance(written, dict) else written, list)
    assert model.distribute_strategy.extended.group.engine.timeline is None, "it was not recorded before"


def test_a_timeline_that_cannot_be_written_is_an_error_before_training(tmp_path):
    with pytest.raises(OSError, match="cannot be written: directory missing or not writable"):
        fit(tfdist.callbacks.Timeline(tmp_path / "missing" / "timeline.json"))
