"""Training on parameter servers: when updates are applied, and what late ones are worth.

`tfdist.ParameterServerStrategy` takes them as ``synchronization=`` and ``staleness_policy=``; ``pushes=`` and
``hierarchy=`` say what is pushed, and by which servers.
"""

from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.pushes import ElasticAveraging, Hogwild, LocalSteps
from tfdist.parameter_server.options.staleness import (
    AsItIs,
    DelayCompensated,
    DropBeyond,
    Exponential,
    Inverse,
    StalenessPolicy,
)
from tfdist.parameter_server.options.synchronization import (
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
