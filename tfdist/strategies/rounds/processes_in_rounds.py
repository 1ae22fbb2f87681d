"""What strategies of processes that train in rounds have alike."""

from __future__ import annotations

import keras

from tfdist.strategies.all_reduce.processes import Processes
from tfdist.strategies.rounds import keras_rounds


class ProcessesInRounds(Processes):
    """One whose `extended` is a `tfdist.strategies.rounds.rounds_extended.RoundsExtended`."""

    def settle(self, model: keras.Model) -> None:
        """Ends the round, and makes the weights of a model equal on all processes, which all call this.

        For training loops of one's own, before they save: `fit`, `evaluate` and `predict` do it.

        Args:
            model: that was made in the scope of this strategy.
        """
        keras_rounds.settle(model, self.extended)
