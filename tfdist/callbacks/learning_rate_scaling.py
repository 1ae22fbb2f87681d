"""A callback that scales the learning rate with the number of processes."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdist.callbacks.processes import has_others, processes_of
from tfdist.private import optimizers
from tfdist.strategies.keras.keras_optimizers import innermost

_RULES = {"linear": lambda factor: factor, "sqrt": math.sqrt}


class LearningRateScaling(keras.callbacks.Callback):
    """Scales the learning rate to the batch of all processes, and warms up to it gradually.

    In warm-up the rate grows by the same amount in each step, from that of one process to the scaled one. Afterwards it
    is left to others, such as `keras.callbacks.ReduceLROnPlateau`. The same holds for training that continues after the
    warm-up (``initial_epoch``, `keras.callbacks.BackupAndRestore`).

    Args:
        learning_rate: learning rate for the batch of one process.
        rule: ``"linear"``, for SGD: the rate grows in proportion to the batch. ``"sqrt"``, usual for adaptive
            optimizers: it grows with the square root of the batch.
        warmup_epochs: duration of the warm-up in epochs; may be a fraction, or 0.
        factor: size of the whole batch, relative to that of one process; by default the number of replicas.
        steps_per_epoch: number of steps in an epoch; needed only where ``fit`` does not know it.

    Raises:
        ValueError: an argument is out of its range, or the optimizer has a schedule of its own.

    References:
        Goyal et al., Accurate, large minibatch SGD: training ImageNet in 1 hour, 2017.
    """

    def __init__(
        self,
        learning_rate: float,
        rule: str = "linear",
        warmup_epochs: float = 5,
        factor: float | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if rule not in _RULES:
            raise ValueError(f"LearningRateScaling(rule=…) must be one of {', '.join(_RULES)}; got {rule!r}")
        if learning_rate <= 0 or warmup_epochs < 0 or (factor is not None and factor <= 0):
            raise ValueError(
                "LearningRateScaling takes a positive learning_rate and factor, and warmup_epochs of at least 0; got "
                f"{learning_rate}, {factor} and {warmup_epochs}"
            )
        self._base, self._rule = learning_rate, rule
        self._warmup, self._factor, self._steps = warmup_epochs, factor, steps_per_epoch
        self._epoch = 0
        self._is_over = self._was_warming = False

    @property
    def target(self) -> float:
        """The scaled learning rate; known during training."""
        replicas = self._factor
        if replicas is None:  # without a strategy, Keras uses one of a single replica
            replicas = max(processes_of(self.model).size, self.model.distribute_strategy.num_replicas_in_sync)
        return self._base * _RULES[self._rule](replicas)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the learning rate can be set."""
        if self._factor is None:
            has_others(self)
        rate = optimizers.learning_rate(innermost(self.model.optimizer))
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(
                "LearningRateScaling sets the learning rate, but the optimizer has its own schedule: give the "
                "optimizer a number as learning rate, or leave out the callback and scale the schedule"
            )
        self._is_over = self._was_warming = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the number of the epoch; training may begin after the warm-up."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the learning rate in each step of the warm-up, and once after it."""
        if self._is_over:
            return
        done = self._share_of_warmup(batch)
        if done < 1:
            self._was_warming = True
            self.model.optimizer.learning_rate = self._base + (self.target - self._base) * done
            return
        self._is_over = True
        if self._was_warming or not self._epoch:
            self.model.optimizer.learning_rate = self.target

    def _share_of_warmup(self, batch: int) -> float:
        if not self._warmup:
            return math.inf
        steps = self._steps or self.params.get("steps")
        if not steps:
            raise ValueError("LearningRateScaling needs steps_per_epoch: fit does not know how many steps there are")
        return (self._epoch + batch / steps) / self._warmup
