"""Training on parameter servers: when updates are applied, and what late ones are worth.

`tfdist.ParameterServerStrategy` takes them as ``synchronization=`` and ``staleness_policy=``; ``pushes=`` and
``hierarchy=`` say what is pushed, and by which servers.
"""

from tfdist.parameter_server.hierarchy.option import PerHost
from tfdist.parameter_server.pushes import ElasticAveraging, Hogwild, LocalSteps
from tfdist.parameter_server.staleness import (
    AsItIs,
    DelayCompensated,
    DropBeyond,
    Exponential,
    Inverse,
    StalenessPolicy,
)
from tfdist.parameter_server.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
    Synchronization,
    Synchronous,
)

__all__ = [
    "AsItIs",
    "Asynchronous",
    "BoundedStaleness",
    "DelayCompensated",
    "DropBeyond",
    "ElasticAveraging",
    "Exponential",
    "Hogwild",
    "Inverse",
    "LocalSteps",
    "PerHost",
    "SoftSync",
    "StalenessPolicy",
    "Synchronization",
    "Synchronous",
]
