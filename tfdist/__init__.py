"""Training of Keras 3 models on several devices, processes and machines.

The names below are imported when they are first used, so that ``tfdist run`` and the rendezvous server start without
waiting for TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tfdist import other_names
from tfdist._version import __version__

if TYPE_CHECKING:
    from tfdist import (
        callbacks,
        compression,
        errors,
        functional,
        gossip,
        layers,
        local_sgd,
        optimizers,
        parameter_server,
    )
    from tfdist.cluster.settings import Timeouts
    from tfdist.distribution.enabling import enable_keras_distribution
    from tfdist.errors import (
        CalibrationError,
        ClusterSpecError,
        CollectiveTimeoutError,
        IncompatibleKerasError,
        MismatchError,
        MPIUnavailableError,
        PayloadError,
        PeerLostError,
        RendezvousError,
        TensorFlowMissingError,
        TfdistError,
    )
    from tfdist.functional import (
        Adasum,
        Group,
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        broadcast_variables,
        join,
        receive,
        reduce_scatter,
        send,
    )
    from tfdist.initialization import init, is_initialized, local_rank, local_size, rank, role, size
    from tfdist.model_parallel.analysis import analyze
    from tfdist.model_parallel.device_scope import device_scope
    from tfdist.model_parallel.loading import load_model
    from tfdist.model_parallel.partition import partition
    from tfdist.optimizers.distributed_optimizer import DistributedOptimizer
    from tfdist.optimizers.gradient_tape import DistributedGradientTape
    from tfdist.pipeline.strategy import PipelineStrategy
    from tfdist.runtime.mesh import Mesh
    from tfdist.strategies.all_reduce.all_reduce import AllReduceStrategy
    from tfdist.strategies.keras.keras_losses import scale_summed_loss
    from tfdist.strategies.rounds.gossip import GossipStrategy
    from tfdist.strategies.rounds.local_sgd import LocalSGDStrategy
    from tfdist.strategies.rounds.quorum import QuorumStrategy
    from tfdist.strategies.servers.parameter_server import ParameterServerStrategy
    from tfdist.strategies.servers.sidecar_evaluator import SidecarEvaluator

_ERRORS = """CalibrationError ClusterSpecError CollectiveTimeoutError IncompatibleKerasError MPIUnavailableError
MismatchError PayloadError PeerLostError RendezvousError TensorFlowMissingError TfdistError"""
_FUNCTIONS = """Adasum Group all_gather all_reduce all_to_all barrier broadcast broadcast_variables join receive
reduce_scatter send"""
_PLACE = "init is_initialized local_rank local_size rank role size"
_HOMES = {
    "AllReduceStrategy": "tfdist.strategies.all_reduce.all_reduce",
    "DistributedGradientTape": "tfdist.optimizers.gradient_tape",
    "DistributedOptimizer": "tfdist.optimizers.distributed_optimizer",
    "GossipStrategy": "tfdist.strategies.rounds.gossip",
    "LocalSGDStrategy": "tfdist.strategies.rounds.local_sgd",
    "Mesh": "tfdist.runtime.mesh",
    "PipelineStrategy": "tfdist.pipeline.strategy",
    "ParameterServerStrategy": "tfdist.strategies.servers.parameter_server",
    "QuorumStrategy": "tfdist.strategies.rounds.quorum",
    "SidecarEvaluator": "tfdist.strategies.servers.sidecar_evaluator",
    "Timeouts": "tfdist.cluster.settings",
    "analyze": "tfdist.model_parallel.analysis",
    "device_scope": "tfdist.model_parallel.device_scope",
    "enable_keras_distribution": "tfdist.distribution.enabling",
    "load_model": "tfdist.model_parallel.loading",
    "partition": "tfdist.model_parallel.partition",
    "scale_summed_loss": "tfdist.strategies.keras.keras_losses",
    **dict.fromkeys(_ERRORS.split(), "tfdist.errors"),
    **dict.fromkeys(_FUNCTIONS.split(), "tfdist.functional"),
    **dict.fromkeys(_PLACE.split(), "tfdist.initialization"),
}

__all__ = [
    "Adasum",
    "AllReduceStrategy",
    "CalibrationError",
    "ClusterSpecError",
    "CollectiveTimeoutError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GossipStrategy",
    "Group",
    "IncompatibleKerasError",
    "LocalSGDStrategy",
    "MPIUnavailableError",
    "Mesh",
    "MismatchError",
    "ParameterServerStrategy",
    "PayloadError",
    "PeerLostError",
    "PipelineStrategy",
    "QuorumStrategy",
    "RendezvousError",
    "SidecarEvaluator",
    "TensorFlowMissingError",
    "TfdistError",
    "Timeouts",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "analyze",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "compression",
    "device_scope",
    "enable_keras_distribution",
    "errors",
    "functional",
    "gossip",
    "init",
    "is_initialized",
    "join",
    "layers",
    "load_model",
    "local_rank",
    "local_sgd",
    "local_size",
    "optimizers",
    "parameter_server",
    "partition",
    "rank",
    "receive",
    "reduce_scatter",
    "role",
    "scale_summed_loss",
    "send",
    "size",
]


if not TYPE_CHECKING:  # with this function, a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if not name.startswith("_") and importlib.util.find_spec(f"tfdist.{name}"):
            return importlib.import_module(f"tfdist.{name}")
        raise other_names.missing(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
