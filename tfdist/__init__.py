"""Training of Keras 3 models on several devices, processes and machines.

The names below are imported when they are first used: ``tfdist run`` and the rendezvous server
start without waiting for TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdist._version import __version__

if TYPE_CHECKING:
    from tfdist.cluster.settings import Timeouts
    from tfdist.errors import (
        ClusterSpecError,
        CollectiveTimeoutError,
        MismatchError,
        MPIUnavailableError,
        PeerLostError,
        RendezvousError,
        TensorFlowMissingError,
        TfdistError,
    )
    from tfdist.strategies.all_reduce import AllReduceStrategy

_HOMES = {
    "AllReduceStrategy": "tfdist.strategies.all_reduce",
    "ClusterSpecError": "tfdist.errors",
    "CollectiveTimeoutError": "tfdist.errors",
    "MPIUnavailableError": "tfdist.errors",
    "MismatchError": "tfdist.errors",
    "PeerLostError": "tfdist.errors",
    "RendezvousError": "tfdist.errors",
    "TensorFlowMissingError": "tfdist.errors",
    "TfdistError": "tfdist.errors",
    "Timeouts": "tfdist.cluster.settings",
}

__all__ = [
    "AllReduceStrategy",
    "ClusterSpecError",
    "CollectiveTimeoutError",
    "MPIUnavailableError",
    "MismatchError",
    "PeerLostError",
    "RendezvousError",
    "TensorFlowMissingError",
    "TfdistError",
    "Timeouts",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
