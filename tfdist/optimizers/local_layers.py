"""A warning of layers that ask for means over all replicas, which `DistributedOptimizer` does not compute."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from tfdist.private.models import layers_of

log = logging.getLogger("tfdist")

_told: weakref.WeakSet[Any] = weakref.WeakSet()


def warn(model: Any, processes: int) -> None:
    """Warns, once for each model, that synchronized batch normalization uses each process's own statistics.

    Args:
        model: a Keras model.
        processes: number of processes that average the model's gradients.
    """
    names = [layer.name for layer in layers_of(model) if getattr(layer, "synchronized", False) is True]
    if processes == 1 or not names or model in _told:
        return
    _told.add(model)
    log.warning(
        "tfdist: %s: synchronized=True has no effect with DistributedOptimizer, which averages only gradients: each "
        "process normalizes by the statistics of its own batch. Train with tfdist.AllReduceStrategy to synchronize "
        "them.",
        ", ".join(names[:3]),
    )
