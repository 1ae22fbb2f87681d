"""Schedules of pipelines, as tables.

| schedule | idle share of p workers, m micro-batches, equal parts | activations kept by worker w |
|---|---|---|
| `gpipe` | (p − 1) / (m + p − 1) | m |
| `one_forward_one_backward` | (p − 1) / (m + p − 1) | p − w |
| `interleaved`, v stages each | (p − 1) / (v·m + p − 1) | 2 (p − w − 1) + (v − 1) p + 1, of 1/v the size |
| `zero_bubble` | (p − 1) / (3 m + p − 1) | p |

References:
    Huang et al. 2019, "GPipe": https://arxiv.org/abs/1811.06965
    Harlap et al. 2018, "PipeDream" (1F1B): https://arxiv.org/abs/1806.03377
    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training" (interleaved):
    https://arxiv.org/abs/2104.04473
    Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (ZB-H1): https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from tfdist.pipeline.actions import Action, ActionKind
from tfdist.pipeline.table import Edge, Table


def gpipe(stages: int, micro_batches: int, edges: Collection[Edge] | None = None) -> Table:
    """Schedules all forward passes before all backward passes.

    Args:
        stages: number of stages, one for each worker.
        micro_batches: number of micro-batches.
        edges: edges between stages; by default from each stage to the next.
    """
    rows = [
        [
            Action(stage, kind, number)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for number in range(micro_batches)
        ]
        for stage in range(stages)
    ]
    return Table(rows, stages, micro_batches, edges)


def one_forward_one_backward(stages: int, micro_batches: int, edges: Collection[Edge] | None = None) -> Table:
    """Schedules 1F1B: each worker begins backward passes as soon as it can, then alternates them with forward passes.

    Args:
        stages: number of stages, one for each worker.
        micro_batches: number of micro-batches.
        edges: edges between stages; by default from each stage to the next.
    """
    rows = []
    for stage in range(stages):
        forward = [Action(stage, ActionKind.FORWARD, number) for number in range(micro_batches)]
        backward = [Action(stage, ActionKind.BACKWARD, number) for number in range(micro_batches)]
        rows.append(_alternating(forward, backward, stages - stage))
    return Table(rows, stages, micro_batches, edges)


def interleaved(stages: int, micro_batches: int, workers: int, edges: Collection[Edge] | None = None) -> Table:
    """Schedules 1F1B with several stages on each worker, dealt out in turn, so that all workers begin sooner.

    Args:
        stages: number of stages, a multiple of ``workers``.
        micro_batches: number of micro-batches.
        workers: number of workers.
        edges: edges between stages; by default from each stage to the next.

    Raises:
        ValueError: ``workers`` does not divide ``stages``.
    """
    if stages % workers:
        raise ValueError(
            f"interleaved stages need the same number on each worker; got {stages} stages on {workers} workers"
        )
    chunks = stages // workers
    # The number of groups of micro-batches. A worker takes a group through one of its stages before it goes on with the
    # next stage. A group has at least one micro-batch for each worker, if there are so many.
    rounds = max(1, micro_batches // workers)
    ends = [(number + 1) * micro_batches // rounds for number in range(rounds)]
    groups = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    largest = max(map(len, groups))
    rows = []
    for worker in range(workers):
        worker_stages = range(worker, stages, workers)
        forward = [
            Action(stage, ActionKind.FORWARD, number) for group in groups for stage in worker_stages for number in group
        ]
        backward = [
            Action(stage, ActionKind.BACKWARD, number)
            for group in groups
            for stage in reversed(worker_stages)
            for number in group
        ]
        ahead = (2 * (workers - worker - 1) + (chunks - 1) * largest + 1) if chunks > 1 else workers - worker
        rows.append(_alternating(forward, backward, ahead))
    return Table(rows, stages, micro_batches, edges)


def zero_bubble(stages: int, micro_batches: int, edges: Collection[Edge] | None = None) -> Table:
    """Schedules ZB-H1: 1F1B that computes gradients of weights while it would wait; later stages delay them more.

    If all actions take the same time and there are at least as many micro-batches as stages, a worker waits only for
    the first activations and the first gradients. No worker keeps more activations than the first one does in 1F1B.

    Args:
        stages: number of stages, one for each worker.
        micro_batches: number of micro-batches.
        edges: edges between stages; by default from each stage to the next.
    """
    rows = []
    for stage in range(stages):
        forward, inputs, weights = (
            [Action(stage, kind, number) for number in range(micro_batches)]
            for kind in (ActionKind.FORWARD, ActionKind.INPUTS, ActionKind.WEIGHTS)
        )
        ahead = stages - stage
        row = forward[:ahead]
        for number in range(micro_batches):
            row.append(inputs[number])
            if number >= stage:
                row.append(weights[number - stage])
            row += forward[number + ahead : number + ahead + 1]
        rows.append(row + weights[max(micro_batches - stage, 0) :])
    return Table(rows, stages, micro_batches, edges)


def forward_only(workers: Sequence[int], micro_batches: int, edges: Collection[Edge] | None = None) -> Table:
    """Schedules forward passes alone, for `evaluate` and `predict`.

    Args:
        workers: number of the worker of each stage, as in the table for training.
        micro_batches: number of micro-batches.
        edges: edges between stages; by default from each stage to the next.
    """
    rows: list[list[Action]] = [[] for _ in range(max(workers) + 1)]
    for number, (stage, worker) in itertools.product(range(micro_batches), enumerate(workers)):
        rows[worker].append(Action(stage, ActionKind.FORWARD, number))
    return Table(rows, len(workers), micro_batches, edges, training=False)


def _alternating(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> list[Action]:
    """Orders some forward passes, then backward and forward passes in turn, then the remaining backward passes."""
    ahead = min(ahead, len(forward))
    row = list(forward[:ahead])
    for backward_action, forward_action in itertools.zip_longest(backward, forward[ahead:]):
        row += [action for action in (backward_action, forward_action) if action is not None]
    return row
