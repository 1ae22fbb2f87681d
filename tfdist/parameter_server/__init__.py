"""Training on parameter servers: when updates are applied, and what late ones are worth.

`tfdist.ParameterServerStrategy` takes modes, with policies for late gradients, as ``synchronization=``; ``pushes=``
says what workers push, and ``servers=`` how servers keep it.
"""

from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.pushes import ElasticAveraging, Gradients, Hogwild, LocalSteps
from tfdist.parameter_server.options.servers import Servers
from tfdist.parameter_server.options.staleness import (
    DelayCompensated,
    DropBeyond,
    Exponential,
    Inverse,
    StalenessPolicy,
    Unscaled,
)
from tfdist.parameter_server.options.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
    Synchronization,
    Synchronous,
)

__all__ = [
    "Asynchronous",
    "BoundedStaleness",
    "DelayCompensated",
    "DropBeyond",
    "ElasticAveraging",
    "Exponential",
    "Gradients",
    "Hogwild",
    "Inverse",
    "LocalSteps",
    "PerHost",
    "Servers",
    "SoftSync",
    "StalenessPolicy",
    "Synchronization",
    "Synchronous",
    "Unscaled",
]
