"""What a person sees of a schedule."""

import sys

import pytest

from tfdist.pipeline.actions import ActionKind
from tfdist.pipeline.dry_run import dry_run
from tfdist.pipeline.schedules import gpipe, interleaved, one_forward_one_backward


def run(table):
    return dry_run(table, lambda action: 2.0 if action.kind is ActionKind.BACKWARD else 1.0)


def test_schedule_is_printed_as_text_timeline():
    text = str(run(gpipe(2, 2)))
    assert text.splitlines() == [
        "worker 0  |F0 F1 .........B0    B1    |",
        "worker 1  |...F0 F1 B0    B1    ......|",
        "Idle: 33.3% of the workers' time. Micro-batches whose activations are kept at once, by worker: 2, 2.",
    ]


def test_stages_are_shown_where_a_worker_has_several():
    assert "worker 1  |....1F0 " in str(run(interleaved(4, 2, 2)))


def test_long_schedules_are_printed_in_200_columns():
    lines = str(run(one_forward_one_backward(8, 100))).splitlines()
    assert max(map(len, lines[:-1])) <= 200
    assert len(set(map(len, lines[:-1]))) == 1


def test_draw_writes_svg_and_needs_matplotlib(tmp_path, monkeypatch):
    run(gpipe(2, 2)).draw(tmp_path / "schedule.svg")
    assert "worker 1" in (tmp_path / "schedule.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        run(gpipe(2, 2)).draw(tmp_path / "other.svg")
