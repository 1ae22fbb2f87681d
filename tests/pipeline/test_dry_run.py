"""The dry run: times, memory, and deadlocks."""

import pytest

from tfdist.pipeline.dry_run import DeadlockError, dry_run
from tfdist.pipeline.schedules import gpipe
from tfdist.pipeline.table import Table


def test_dry_run_computes_times_and_idle_share():
    timeline = dry_run(gpipe(2, 1), lambda action: 2.0 if action.stage else 1.0, latency=0.5)
    spans = [(str(span.action), span.begin, span.end) for row in timeline.spans for span in row]
    assert spans == [("0F0", 0, 1), ("0B0", 6, 7), ("1F0", 1.5, 3.5), ("1B0", 3.5, 5.5)]
    assert timeline.seconds == 7
    assert timeline.idle_share == pytest.approx(1 - 6 / 14)


def test_kept_activations_can_be_weighted_by_stage():
    timeline = dry_run(gpipe(2, 3))
    assert timeline.kept(0) == 3
    assert timeline.kept(1, lambda stage: 10.0 * stage) == 30


def test_deadlock_error_names_waiting_workers_and_actions():
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(DeadlockError, match="worker 0 cannot run 0B0 before 1B0; worker 1 cannot run 1F1 before 0F1"):
        dry_run(Table(rows, 2, 2))
