"""Records when each action of a training step began and ended, for comparison with the step's table."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.clock import clock_offset
from tfdist.engine.exchange import Exchange
from tfdist.engine.group import ProcessGroup
from tfdist.pipeline.actions import Action, ActionKind
from tfdist.pipeline.dry_run import PipelineTimeline, TimelineSpan
from tfdist.private.graphs import unordered

KEPT = 64
"""Number of steps whose times are kept."""
_KINDS = tuple(ActionKind)


class Stamps:
    """The time stamps of the actions of one step; in graphs, operations between the actions take them.

    Args:
        keep: called at the end of the step with the actions, and their times as a float64 array [actions, 2]: begin and
            end, in seconds of `tf.timestamp`.
    """

    def __init__(self, keep: Callable[[Sequence[Action], np.ndarray], None]) -> None:
        self._keep = keep
        self._actions: list[Action] = []
        self._times: list[tf.Tensor] = []

    def around(
        self, action: Action, taken: Iterable[tf.Tensor], compute: Callable[[], list[tf.Operation]]
    ) -> list[Any]:
        """Computes an action, and takes the time before and after it.

        Args:
            action: the action to compute.
            taken: tensors that the action waits for.
            compute: computes the action; returns the operations that run last, or nothing if the action ran eagerly.

        Returns:
            The operations that run last; empty if the action ran eagerly.
        """
        begin = self._stamp(taken)
        with tf.control_dependencies([begin]):
            last = compute()
        end = self._stamp(last)
        self._actions.append(action)
        self._times += [begin, end]
        return [end] if last else []

    def close(self) -> None:
        """Hands over all times once they are taken."""

        def keep(times: np.ndarray) -> None:
            self._keep(self._actions, times.reshape(-1, 2))

        tf.numpy_function(keep, [tf.stack(self._times)], [])

    @staticmethod
    def _stamp(after: Iterable[tf.Tensor | tf.Operation]) -> tf.Tensor:
        """Returns the time after some operations, which waits for no other worker's: workers act at the same time."""
        with tf.control_dependencies(after), tf.device("/CPU:0"):
            return unordered(tf.timestamp())


class Recording:
    """The times of the actions of the last training steps.

    Args:
        group: the processes of one pipeline, where the rank of each is its worker's number; or one process with all
            workers.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._steps: collections.deque[np.ndarray] = collections.deque(maxlen=KEPT)

    def of_step(self, workers: Sequence[int]) -> Stamps:
        """Begins to record a step, or traces a recorded step.

        Args:
            workers: number of the worker of each stage.
        """

        def keep(actions: Sequence[Action], times: np.ndarray) -> None:
            names = [
                [workers[action.stage], action.stage, _KINDS.index(action.kind), action.micro_batch]
                for action in actions
            ]
            monotonic = times + (time.monotonic() - time.time())
            self._steps.append(np.concatenate([np.array(names, np.float64), monotonic], 1))

        return Stamps(keep)

    def timeline(self, step: int = -1) -> PipelineTimeline:
        """Returns the times of all workers' actions in a step, in seconds. All processes of the group call it.

        Args:
            step: index among the steps that are kept; the last one by default.

        Raises:
            ValueError: there is no such step.
        """
        if not -len(self._steps) <= step < len(self._steps):
            raise ValueError(
                f"the times of {len(self._steps)} training steps have been recorded ({KEPT} are kept at most); there "
                f"is no step {step} among them"
            )
        local_rows = self._steps[step].copy()
        local_rows[:, 4:] += self._group.run("recording: the clocks", clock_offset())
        rows = Exchange(self._group).all_gather(tf.constant(local_rows)).numpy()
        first = float(rows[:, 4].min())
        spans = [
            TimelineSpan(int(worker), Action(int(stage), _KINDS[int(kind)], int(number)), begin - first, end - first)
            for worker, stage, kind, number, begin, end in rows.tolist()
        ]
        spans.sort(key=lambda span: (span.begin, span.end))
        count = 1 + max(span.worker for span in spans)
        return PipelineTimeline(
            tuple(tuple(recorded for recorded in spans if recorded.worker == worker) for worker in range(count))
        )
