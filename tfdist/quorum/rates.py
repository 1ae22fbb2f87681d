"""The learning rates with which the epochs of a call of `fit` began, for processes that come later.

Callbacks may set a rate relative to the one before, such as ``LearningRateScheduler(lambda epoch, rate: 0.9 * rate)``,
and every process has them. So one that comes takes the rate from before the callbacks of the epochs that it is yet to
begin; with the rate of the moment, it would do twice what they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

EPOCHS = 64
"""That are remembered: so many epochs at most pass while a process takes its first step."""


class Rates:
    """Rates at the beginnings of the last epochs, before callbacks.

    Attributes:
        epoch: the last one; -1 outside of `fit`.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self._of_epochs: deque[tuple[float, ...]] = deque(maxlen=EPOCHS)

    def begin_epoch(self, epoch: int, rates: Sequence[float]) -> None:
        """Notes what an epoch begins with.

        Args:
            epoch: its number.
            rates: one for each learning rate that the optimizer has.
        """
        if epoch != self.epoch + 1:
            self._of_epochs.clear()
        self.epoch = epoch
        self._of_epochs.append(tuple(rates))

    def end_fit(self) -> None:
        """Forgets all of them."""
        self.epoch = -1
        self._of_epochs.clear()

    @property
    def of_epochs(self) -> tuple[tuple[float, ...], ...]:
        """Those of the last epochs, in order."""
        return tuple(self._of_epochs)


def before(epoch: int, last: int, of_epochs: Sequence[tuple[float, ...]]) -> tuple[float, ...] | None:
    """The rates from before an epoch; of the first one that is remembered, if it is not.

    Args:
        epoch: its number.
        last: number of the last epoch that has begun.
        of_epochs: as `Rates.of_epochs`.

    Returns:
        None if the epoch is yet to begin everywhere: then the rates are those of the moment.
    """
    if epoch > last or not of_epochs:
        return None
    return of_epochs[max(0, len(of_epochs) - 1 - (last - epoch))]
