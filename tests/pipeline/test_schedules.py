"""Schedules keep what their papers promise, for 1 to 64 stages."""

import pytest

from tfdist.pipeline import schedules
from tfdist.pipeline.actions import ActionKind
from tfdist.pipeline.dry_run import dry_run

COSTS = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0, ActionKind.INPUTS: 1.0, ActionKind.WEIGHTS: 1.0}
SIZES = [(p, m) for p in (1, 2, 3, 4, 7, 8) for m in range(1, 20)] + [(16, 40), (64, 64), (64, 100), (33, 5)]


def run(table):
    return dry_run(table, lambda action: COSTS[action.kind])


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_idle_time_and_memory_equal_formulas(p, m):
    gpipe, alternating = run(schedules.gpipe(p, m)), run(schedules.one_forward_one_backward(p, m))
    for timeline in (gpipe, alternating):
        assert timeline.idle_share == pytest.approx((p - 1) / (m + p - 1))
    assert [gpipe.kept(worker) for worker in range(p)] == [m] * p
    assert [alternating.kept(worker) for worker in range(p)] == [min(m, p - worker) for worker in range(p)]
    divided = run(schedules.zero_bubble(p, m))
    if m >= p:
        assert divided.idle_share == pytest.approx((p - 1) / (3 * m + p - 1))
    assert divided.idle_share <= alternating.idle_share + 1e-9
    assert max(divided.kept(worker) for worker in range(p)) == min(p, m)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [size for size in SIZES if size[0] <= 8])
def test_interleaved_idle_time_and_memory_equal_formulas(p, m, chunks):
    table = schedules.interleaved(p * chunks, m, p)
    assert table.workers == tuple(stage % p for stage in range(p * chunks))
    timeline = run(table)  # in particular, it ends
    if m % p == 0:
        assert timeline.idle_share == pytest.approx((p - 1) / (chunks * m + p - 1))
        most = min(2 * (p - 1) + (chunks - 1) * p + 1, chunks * m) if chunks > 1 else min(p, m)
        assert timeline.kept(0) == most


@pytest.mark.parametrize("make", [schedules.gpipe, schedules.one_forward_one_backward, schedules.zero_bubble])
@pytest.mark.parametrize("edges", [[(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)], [(0, 3), (1, 3), (2, 3)]])
def test_skip_connections_and_independent_stages_cause_no_deadlock(make, edges):
    run(make(4, 6, edges))


def test_forward_only_table_has_no_backward_actions():
    table = schedules.forward_only([0, 1, 1, 0], 3)
    assert table.workers == (0, 1, 1, 0), "those that train the stages"
    assert [[str(action) for action in row] for row in table.rows] == [
        ["0F0", "3F0", "0F1", "3F1", "0F2", "3F2"],
        ["1F0", "2F0", "1F1", "2F1", "1F2", "2F2"],
    ]
    run(table)


def test_interleaved_raises_if_workers_do_not_divide_stages():
    with pytest.raises(ValueError, match="the same number on each worker; got 5 stages on 2 workers"):
        schedules.interleaved(5, 4, 2)
