"""The learning rates with which the epochs of a call of `fit` began, for processes that join later.

Callbacks may set a rate relative to the one before, such as ``LearningRateScheduler(lambda epoch, rate: 0.9 * rate)``,
and every process runs them. So a process that joins takes the rate from before the callbacks of the epochs that it has
yet to begin. With the current rate, it would apply them twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

EPOCHS = 64
"""Number of epochs that are remembered. At most so many pass while a process takes its first step."""


class Rates:
    """Learning rates at the beginnings of the last epochs, before callbacks.

    Attributes:
        epoch: number of the last epoch; -1 outside of `fit`.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self._of_epochs: deque[tuple[float, ...]] = deque(maxlen=EPOCHS)

    def begin_epoch(self, epoch: int, rates: Sequence[float]) -> None:
        """Notes the learning rates at the beginning of an epoch.

        Args:
            epoch: number of the epoch.
            rates: one value for each learning rate that the optimizer has.
        """
        if epoch != self.epoch + 1:
            self._of_epochs.clear()
        self.epoch = epoch
        self._of_epochs.append(tuple(rates))

    def end_fit(self) -> None:
        """Forgets all learning rates."""
        self.epoch = -1
        self._of_epochs.clear()

    @property
    def of_epochs(self) -> tuple[tuple[float, ...], ...]:
        """Learning rates at the beginnings of the last epochs, in order."""
        return tuple(self._of_epochs)


def rates_before_epoch(epoch: int, last: int, of_epochs: Sequence[tuple[float, ...]]) -> tuple[float, ...] | None:
    """Returns the rates from before an epoch; if it is no longer remembered, those from before the first that is.

    Args:
        epoch: number of the epoch.
        last: number of the last epoch that has begun.
        of_epochs: learning rates at the beginnings of the last epochs, as `Rates.of_epochs`.

    Returns:
        The rates; None if no process has begun the epoch, so that the current rates apply.
    """
    if epoch > last or not of_epochs:
        return None
    return of_epochs[max(0, len(of_epochs) - 1 - (last - epoch))]
