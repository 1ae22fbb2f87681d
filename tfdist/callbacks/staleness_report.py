"""A callback that reports how stale the weights and gradients are that training uses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np

from tfdist.callbacks.summaries import Summaries
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.engine.group import ProcessGroup
from tfdist.notices import notice, notice_once
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import Ability, DelaysUpdates
from tfdist.strategies.round_abilities import TrainsInRounds
from tfdist.strategies.server_abilities import UpdatesOnServers
from tfdist.strategies.servers import server_figures

_NOTHING = "tfdist: the callback StalenessReport does nothing: training uses no stale values."


class StalenessReport(keras.callbacks.Callback):
    """Reports for every epoch how stale the gradients or weights from other processes were when they were used.

    On parameter servers, and with ``AllReduceStrategy(delay=1)``, the staleness of a gradient is the number of updates
    between the parameters that it was computed with and those that it is applied to. With `tfdist.GossipStrategy` it is
    the number of rounds between the weights that a process mixes with and its own. With other strategies nothing is
    stale: the callback then does nothing, and says so once.

    The chief reports the mean and the largest staleness.

    Args:
        log_dir: TensorBoard's log directory, for figures and a histogram; by default nothing is written. TensorBoard
            itself need not be installed.

    Attributes:
        history: figures of every epoch by name, on every process: ``staleness``, the mean, and ``most_staleness``.
        counts: number of times that each staleness was seen on all processes, for every epoch.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        super().__init__()
        self._summaries = Summaries(log_dir)
        self._before: Counter[int] = Counter()
        self.history: dict[str, list[float]] = {}
        self.counts: list[dict[int, int]] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes the reading from which the epoch's counts begin."""
        self._before = self._read() or Counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the staleness of the epoch."""
        now = self._read()
        if now is None:
            notice_once(_NOTHING)
            return
        counts = now - self._before
        rounds = current_strategy.of_model(self.model, TrainsInRounds)
        if rounds is not None:
            counts = _of_all(counts, rounds.group)
            if not counts:
                notice_once(_NOTHING)
                return
        self.counts.append(dict(sorted(counts.items())))
        uses = sum(counts.values())
        figures = {
            "staleness": sum(late * count for late, count in counts.items()) / uses if uses else 0.0,
            "most_staleness": float(max(counts, default=0)),
        }
        for name, figure in figures.items():
            self.history.setdefault(name, []).append(figure)
        writes = current_strategy.of_model(self.model, Ability)
        if writes is not None and writes.is_writer:
            what = "updates old" if rounds is None else "rounds old"
            notice(
                "tfdist: epoch %d: values from other processes were, when used, %.1f %s on average and %d at most.",
                epoch + 1,
                figures["staleness"],
                what,
                figures["most_staleness"],
            )
            self._summaries.write(
                epoch,
                {f"staleness/{name}": figure for name, figure in figures.items()},
                {"staleness/of each use": counts},
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes TensorBoard's file."""
        self._summaries.close()

    def _read(self) -> Counter[int] | None:
        if (servers := current_strategy.of_model(self.model, UpdatesOnServers)) is not None:
            return Counter(server_figures.read(servers, self.model).staleness)
        if (late := current_strategy.of_model(self.model, DelaysUpdates)) is not None:
            return Counter(late.staleness(self.model))
        rounds = current_strategy.of_model(self.model, TrainsInRounds)
        return None if rounds is None else Counter(rounds.staleness(self.model))


def _of_all(counts: Counter[int], group: ProcessGroup) -> Counter[int]:
    rows = np.array(sorted(counts.items()), np.int64).reshape(-1, 2)
    everyone, _ = group.run("callbacks: staleness", all_gather_rows(rows))
    total: Counter[int] = Counter()
    for late, count in everyone.tolist():
        total[late] += count
    return total
