"""A warning for `fit` in a job that was joined by `tfdist.init`: the functions are there, but nothing calls them."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

log = logging.getLogger("tfdist")

_installed = False


def warn_in_fit() -> None:
    """Has Keras's `fit` warn where no strategy and no step of the user's brings the processes together."""
    global _installed
    if _installed or "keras" not in sys.modules:
        return
    _installed = True
    from tfdist.strategies.keras_private import tf_trainer

    trainer = tf_trainer.TensorFlowTrainer
    original = trainer.fit

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._distribute_strategy is None and type(self).train_step is trainer.train_step:
            log.warning(
                "tfdist: this fit trains on this process alone: tfdist.init() joins the job, and leaves calling "
                "tfdist.all_reduce to you. To synchronize fit, build and compile the model inside "
                "`with tfdist.AllReduceStrategy().scope():`."
            )
        return original(self, *args, **kwargs)

    trainer.fit = fit
