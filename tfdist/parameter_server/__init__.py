"""Options for training on parameter servers.

`tfdist.ParameterServerStrategy` takes them: ``synchronization=`` a mode, with a policy for late gradients; ``pushes=``
what workers push; and ``servers=`` how the servers keep their state.
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
