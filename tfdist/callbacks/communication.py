"""A callback that reports the cost of communication."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from tfdist.callbacks.processes import processes_of
from tfdist.callbacks.summaries import Summaries
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.engine.group import ProcessGroup
from tfdist.notices import notice
from tfdist.strategies import current_strategy
from tfdist.strategies.round_abilities import ElasticMembership, TrainsInRounds
from tfdist.strategies.server_abilities import UpdatesOnServers
from tfdist.strategies.servers import server_figures

_NOTICEABLE = 0.05
"""The fraction of an epoch that the others must wait for a rank for it to be reported as the slowest."""


class Communication(keras.callbacks.Callback):
    """Reports the cost of communication for every epoch: on the chief, and optionally to TensorBoard.

    The report contains the MiB sent per process, the seconds with at least one collective running, the fraction of them
    that was overlapped with computation, and the slowest rank, for which the others waited. If gradients are
    compressed, it also contains the compression ratio against a ring all-reduce: in total, and in TensorBoard for each
    variable.

    With `tfdist.GossipStrategy` it also contains how far apart the processes' weights were before the end of the epoch:
    the root of the mean squared distance from their mean, relative to the mean.

    With `tfdist.QuorumStrategy` the report covers this process alone: the rounds that it took part in, the MiB that it
    sent, and the seconds that it spent in rounds.

    On parameter servers the report covers the servers: their updates, the staleness of gradients (in TensorBoard as a
    histogram), what they received and sent, and the worker whose answers waited longest for others.

    Args:
        log_dir: TensorBoard's log directory; by default nothing is written. TensorBoard itself need not be installed.

    Attributes:
        history: figures of every epoch by name, on every rank or worker.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        super().__init__()
        self._summaries = Summaries(log_dir)
        self._begun: np.ndarray | None = None
        self._on_servers: server_figures.Reading | None = None
        self._in_rounds: dict[str, float] = {}
        self._traffic: dict[str, dict[str, int]] = {}
        self.history: dict[str, list[float]] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the readings of parameter servers."""
        self._on_servers = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes the reading from which the epoch's figures are counted."""
        if (extended := current_strategy.of_model(self.model, UpdatesOnServers)) is not None:
            if self._on_servers is None:  # others may have begun the next epoch before this worker
                self._on_servers = server_figures.read(extended, self.model)
            return
        if current_strategy.of_model(self.model, ElasticMembership) is not None:
            self._in_rounds = self.model.distribute_strategy.communication()
            return
        self._begun = _reading(processes_of(self.model))
        self._traffic = self._compressed()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Computes the figures of the epoch over all ranks, and reports them."""
        if (extended := current_strategy.of_model(self.model, UpdatesOnServers)) is not None:
            self._report_servers(extended, epoch)
            return
        if (alone := current_strategy.of_model(self.model, ElasticMembership)) is not None:
            self._report_rounds(alone, epoch)
            return
        assert self._begun is not None
        group = processes_of(self.model)
        spent = _reading(group) - self._begun
        everyone, _ = group.run("callbacks: communication", all_gather_rows(spent[np.newaxis]))
        _, sent, communicating, waiting = everyone.mean(axis=0)
        seconds = everyone[:, 0].max()
        waits = everyone[:, 3]
        # A wait lasts some microseconds longer than what it waits for.
        hidden = max(0.0, 1 - waiting / communicating) if communicating else 1.0
        figures = {
            "mib_sent": sent / 2**20,
            "seconds_communicating": communicating,
            "share_hidden": hidden,
            "slowest_rank": float(group.members[waits.argmin()])
            if waits.max() - waits.min() > _NOTICEABLE * seconds
            else -1.0,
        }
        ratios = self._ratios()
        if ratios:
            figures["compression_ratio"] = ratios.pop("")
        rounds = current_strategy.of_model(self.model, TrainsInRounds)
        if rounds is not None and (distance := rounds.distance(self.model)) is not None:
            figures["replica_distance"] = distance
        for name, figure in figures.items():
            self.history.setdefault(name, []).append(float(figure))
        if group.is_writer:
            self._report(epoch, figures, waits)
            named = {f"communication/{name}": figure for name, figure in figures.items()}
            named.update({f"compression/{name}": ratio for name, ratio in ratios.items()})
            self._summaries.write(epoch, named, {})

    def _report_servers(self, extended: UpdatesOnServers, epoch: int) -> None:
        assert self._on_servers is not None
        before, self._on_servers = self._on_servers, server_figures.read(extended, self.model)
        figures, staleness = server_figures.figures(before, self._on_servers)
        for name, figure in figures.items():
            self.history.setdefault(name, []).append(figure)
        if not extended.is_writer:
            return
        notice(
            "tfdist: epoch %d: the servers made %d updates, %.1f a second, of gradients with a staleness of %.1f on "
            "average and %d at most; they received %.1f MiB and sent %.1f MiB; no worker waited longer than %.2f s.",
            epoch + 1,
            figures["updates"],
            figures["updates_per_second"],
            figures["staleness"],
            figures["most_staleness"],
            figures["mib_received"],
            figures["mib_sent"],
            figures["longest_wait"],
        )
        self._summaries.write(
            epoch,
            {f"servers/{name}": figure for name, figure in figures.items()},
            {"servers/staleness of each": staleness},
        )

    def _report_rounds(self, extended: ElasticMembership, epoch: int) -> None:
        now = self.model.distribute_strategy.communication()
        spent = {name: value - self._in_rounds.get(name, 0) for name, value in now.items()}
        figures = {
            "rounds": float(spent["rounds"]),
            "mib_sent": spent["bytes"] / 2**20,
            "seconds_in_rounds": spent["seconds"],
        }
        for name, figure in figures.items():
            self.history.setdefault(name, []).append(figure)
        if extended.is_writer:
            notice(
                "tfdist: epoch %d: this process took part in %d rounds, sent %.1f MiB, and spent %.2f s in them.",
                epoch + 1,
                *figures.values(),
            )
            self._summaries.write(epoch, {f"communication/{name}": figure for name, figure in figures.items()}, {})

    def _compressed(self) -> dict[str, dict[str, int]]:
        strategy: Any = getattr(self.model, "distribute_strategy", None)
        return strategy.compression() if hasattr(strategy, "compression") else {}

    def _ratios(self) -> dict[str, float]:
        """Returns this epoch's compression ratios by variable, in total under an empty name; empty if uncompressed."""
        spent: dict[str, tuple[int, int]] = {}
        for name, now in self._compressed().items():
            before = self._traffic.get(name, {})
            plain, sent = (now[key] - before.get(key, 0) for key in ("plain_bytes", "sent_bytes"))
            if sent:
                spent[name] = plain, sent
        if spent:
            spent[""] = sum(plain for plain, _ in spent.values()), sum(sent for _, sent in spent.values())
        return {name: plain / sent for name, (plain, sent) in spent.items()}

    def _report(self, epoch: int, figures: dict[str, float], waits: np.ndarray) -> None:
        slowest, distance = int(figures["slowest_rank"]), figures.get("replica_distance")
        slowest_text = (
            f"rank {slowest} was the slowest: the others waited up to {waits.max() - waits.min():.2f} s for it"
            if slowest >= 0
            else "no rank was much slower than the others"
        )
        notice(
            "tfdist: epoch %d: each process sent %.1f MiB%s and communicated for %.2f s, %.0f %% of it hidden by "
            "computation; %s%s.",
            epoch + 1,
            figures["mib_sent"],
            f" (gradients compressed {ratio:.1f} ×)" if (ratio := figures.get("compression_ratio")) else "",
            figures["seconds_communicating"],
            100 * figures["share_hidden"],
            slowest_text,
            "" if distance is None else f"; replicas were {100 * distance:.2g} % apart",
        )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes TensorBoard's file."""
        self._summaries.close()


def _reading(group: ProcessGroup) -> np.ndarray:
    """Returns the clock, bytes sent, seconds communicating and seconds waiting, of this process."""
    statistics = group.engine.statistics
    return np.array(
        [
            time.monotonic(),
            statistics.bytes_sent,
            statistics.communicating_seconds,
            statistics.waiting_seconds,
        ]
    )
