"""Training of Keras 3 models on several devices, processes and machines.

The names below are imported when they are first used: ``tfdist run`` and the rendezvous server
start without waiting for TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdist._version import __version__

if TYPE_CHECKING:
    from tfdist import callbacks, compression
    from tfdist.cluster.settings import Timeouts
    from tfdist.errors import (
        CalibrationError,
        ClusterSpecError,
        CollectiveTimeoutError,
        MismatchError,
        MPIUnavailableError,
        PayloadError,
        PeerLostError,
        RendezvousError,
        TensorFlowMissingError,
        TfdistError,
    )
    from tfdist.functional import (
        Group,
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        broadcast_variables,
        init,
        is_initialized,
        join,
        local_rank,
        local_size,
        rank,
        reduce_scatter,
        size,
    )
    from tfdist.strategies.all_reduce import AllReduceStrategy
    from tfdist.strategies.keras_losses import scale_summed_loss

_HOMES = {
    "AllReduceStrategy": "tfdist.strategies.all_reduce",
    "CalibrationError": "tfdist.errors",
    "ClusterSpecError": "tfdist.errors",
    "CollectiveTimeoutError": "tfdist.errors",
    "Group": "tfdist.functional",
    "MPIUnavailableError": "tfdist.errors",
    "MismatchError": "tfdist.errors",
    "PayloadError": "tfdist.errors",
    "PeerLostError": "tfdist.errors",
    "RendezvousError": "tfdist.errors",
    "TensorFlowMissingError": "tfdist.errors",
    "TfdistError": "tfdist.errors",
    "Timeouts": "tfdist.cluster.settings",
    "all_gather": "tfdist.functional",
    "all_reduce": "tfdist.functional",
    "all_to_all": "tfdist.functional",
    "barrier": "tfdist.functional",
    "broadcast": "tfdist.functional",
    "broadcast_variables": "tfdist.functional",
    "init": "tfdist.functional",
    "is_initialized": "tfdist.functional",
    "join": "tfdist.functional",
    "local_rank": "tfdist.functional",
    "local_size": "tfdist.functional",
    "rank": "tfdist.functional",
    "reduce_scatter": "tfdist.functional",
    "scale_summed_loss": "tfdist.strategies.keras_losses",
    "size": "tfdist.functional",
}

_MODULES = ("callbacks", "compression")

__all__ = [
    "AllReduceStrategy",
    "CalibrationError",
    "ClusterSpecError",
    "CollectiveTimeoutError",
    "Group",
    "MPIUnavailableError",
    "MismatchError",
    "PayloadError",
    "PeerLostError",
    "RendezvousError",
    "TensorFlowMissingError",
    "TfdistError",
    "Timeouts",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "compression",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "reduce_scatter",
    "scale_summed_loss",
    "size",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tfdist.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
