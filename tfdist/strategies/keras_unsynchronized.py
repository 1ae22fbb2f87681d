"""A warning for `fit` after `tfdist.init`, which enters the job but does not synchronize `fit`."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

log = logging.getLogger("tfdist")

_installed = False
_synchronized: list[Callable[[Any], bool]] = []


def accept(synchronizes: Callable[[Any], bool]) -> None:
    """Lets models that are synchronized in another way train without a warning.

    Args:
        synchronizes: whether a model's processes are synchronized, of the model.
    """
    _synchronized.append(synchronizes)


def warn_in_fit() -> None:
    """Makes Keras's `fit` warn if neither a strategy nor a custom step can synchronize the processes."""
    global _installed
    if _installed or "keras" not in sys.modules:
        return
    _installed = True
    from tfdist.strategies.keras_private import tf_trainer

    trainer = tf_trainer.TensorFlowTrainer
    original = trainer.fit

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = self._distribute_strategy is None and type(self).train_step is trainer.train_step
        if plain and not any(synchronizes(self) for synchronizes in _synchronized):
            log.warning(
                "tfdist: this fit trains on this process alone: tfdist.init() enters the job but does not synchronize "
                "fit. Build and compile the model inside `with tfdist.AllReduceStrategy().scope():`; or, if every "
                "process reads a share of the data of its own, compile it with tfdist.DistributedOptimizer(optimizer) "
                "or call tfdist.all_reduce in a custom train_step."
            )
        return original(self, *args, **kwargs)

    trainer.fit = fit
