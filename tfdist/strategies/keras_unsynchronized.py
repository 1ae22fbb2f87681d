"""A warning in `fit` if nothing synchronizes the model in a job of several processes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from tfdist.private.keras import tf_trainer
from tfdist.private.models import strategy_of
from tfdist.seams import trainer
from tfdist.seams.once import Once
from tfdist.strategies.server_abilities import UpdatesOnServers

log = logging.getLogger("tfdist")

_synchronized: list[Callable[[Any], bool]] = []
"""Functions that tell whether a model is synchronized in another way; see `accept`."""
_strategies: weakref.WeakSet[Any] = weakref.WeakSet()
"""The strategies that have been made and still exist."""
_warned: weakref.WeakSet[Any] = weakref.WeakSet()
"""The models that a warning has named."""


def accept(synchronizes: Callable[[Any], bool]) -> None:
    """Lets models that are synchronized in another way train without a warning.

    Args:
        synchronizes: function that tells whether the processes of the model that it is given are synchronized.
    """
    _synchronized.append(synchronizes)


def warn_outside_of(strategy: Any) -> None:
    """Makes Keras's `fit` warn if a model was made outside the scope, as long as the strategy exists.

    Args:
        strategy: a strategy of tfdist, perhaps under construction. There is no warning if it has only one process
            and no servers, or if this process does not train.
    """
    _strategies.add(strategy)
    warn_in_fit()


@Once
def warn_in_fit() -> None:
    """Makes Keras's `fit` warn if neither a strategy nor a custom step can synchronize the processes."""
    trainer.points.provide([Unsynchronized], lambda model: [Unsynchronized()] if strategy_of(model) is None else [])


class Unsynchronized(trainer.TrainerHooks):
    """The hooks of a model that was made under no strategy."""

    def fit(self, call: trainer.TrainerCall) -> None:
        """Warns if nothing synchronizes the processes."""
        if not any(synchronizes(call.model) for synchronizes in _synchronized):
            has_own_step = type(call.model).train_step is not tf_trainer.TensorFlowTrainer.train_step
            _warn(call.model, next(filter(_trains_together, _strategies), None), has_own_step)


def _trains_together(strategy: Any) -> bool:
    extended = getattr(strategy, "extended", None)
    return extended is not None and strategy.rank >= 0 and (strategy.size > 1 or isinstance(extended, UpdatesOnServers))


def _warn(model: Any, strategy: Any, has_own_step: bool) -> None:
    if strategy is not None and model not in _warned:
        _warned.add(model)
        log.warning(
            "tfdist: the model %s was made outside of the scope of %s: this process trains it alone, and other "
            "processes train their own copies. To train it on all processes together, make and compile it inside "
            "`with strategy.scope():`.",
            model.name,
            type(strategy).__name__,
        )
    elif strategy is None and not has_own_step:
        log.warning(
            "tfdist: this fit trains on this process alone: tfdist.init() enters the job but does not synchronize "
            "fit. Build and compile the model inside `with tfdist.AllReduceStrategy().scope():`; or, if each "
            "process reads its own share of the data, compile it with tfdist.DistributedOptimizer(optimizer) "
            "or call tfdist.all_reduce in a custom train_step."
        )
