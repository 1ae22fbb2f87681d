"""A callback that averages logs over processes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks.processes import has_others, processes_of
from tfdist.engine.exchange import Exchange
from tfdist.errors import MismatchError
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel


class MetricAverage(keras.callbacks.Callback):
    """Averages the logs of an epoch over processes, so that all processes decide and report alike.

    For `tfdist.DistributedOptimizer` and other training without a strategy, where each process has the losses and
    metrics of its own data; under a strategy they cover all data. Put it before callbacks that read logs, such as
    `keras.callbacks.EarlyStopping`; what ``fit`` returns and prints contains the averages, too. All processes count
    equally, whatever data they have.

    Raises:
        MismatchError: processes have logs with different names.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages the logs over processes."""
        if not logs or not has_others(self) or current_strategy.of_model(self.model, DataParallel) is not None:
            return
        exchange = Exchange(processes_of(self.model))
        names = sorted(logs)
        everyone = [encoded.decode() for encoded in exchange.all_gather(tf.constant([", ".join(names)])).numpy()]
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise MismatchError(
                    f"MetricAverage: rank 0 has the logs {everyone[0]}; rank {rank} has {theirs}. Compile the same "
                    "metrics on every process, and validate on all or on no process."
                )
        values = np.array([[float(logs[name]) for name in names]])
        means = exchange.all_gather(tf.constant(values)).numpy().mean(axis=0)
        logs.update(zip(names, means.tolist(), strict=True))
