"""The common base class of `LocalSGDStrategy` and `GossipStrategy`."""

from __future__ import annotations

import keras

from tfdist.strategies.all_reduce.processes import Processes
from tfdist.strategies.rounds import keras_rounds


class ProcessesInRounds(Processes):
    """A strategy whose `extended` is a `tfdist.strategies.rounds.rounds_extended.RoundsExtended`."""

    def settle(self, model: keras.Model) -> None:
        """Ends the round, and makes the weights of a model equal on all processes; called by all of them.

        For custom training loops, before they save: `fit`, `evaluate` and `predict` call it themselves.

        Args:
            model: a Keras model that was made in the scope of this strategy.
        """
        keras_rounds.settle(model, self.extended)
