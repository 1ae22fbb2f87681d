"""Translates other libraries' names, for errors about names that do not exist here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_HERE = {
    "Average": 'op="mean"',
    "BroadcastGlobalVariablesCallback": "tfdist.callbacks.BroadcastVariables",
    "Compression": "tfdist.compression, such as tfdist.compression.Float16()",
    "LearningRateScheduleCallback": "keras.callbacks.LearningRateScheduler",
    "LearningRateWarmupCallback": "tfdist.callbacks.LearningRateScaling",
    "Max": 'op="max"',
    "MetricAverageCallback": "tfdist.callbacks.MetricAverage",
    "Min": 'op="min"',
    "MirroredStrategy": "tfdist.AllReduceStrategy",
    "MultiWorkerMirroredStrategy": "tfdist.AllReduceStrategy",
    "ProcessSet": "tfdist.Group",
    "Sum": 'op="sum"',
    "allgather": "tfdist.all_gather",
    "allgather_object": "tfdist.all_gather, of arrays and strings",
    "allreduce": "tfdist.all_reduce",
    "alltoall": "tfdist.all_to_all",
    "broadcast_global_variables": "tfdist.broadcast_variables",
    "broadcast_object": "tfdist.broadcast, of arrays and strings",
    "broadcast_object_fn": "tfdist.broadcast, of arrays and strings",
    "cross_rank": "tfdist.rank",
    "elastic": "tfdist.callbacks.CommitState, or tfdist.QuorumStrategy",
    "cross_size": "tfdist.size() // tfdist.local_size()",
    "grouped_allgather": "tfdist.all_gather, of one tensor after the other",
    "grouped_allreduce": "tfdist.all_reduce, of a list",
    "grouped_reducescatter": "tfdist.reduce_scatter, of one tensor after the other",
    "multi_gpu_model": "tfdist.AllReduceStrategy(devices=…), which takes cpu_relocation=True, too",
    "reducescatter": "tfdist.reduce_scatter",
    "replicate": "tfdist.AllReduceStrategy(devices=…), which takes cpu_relocation=True, too",
    "shutdown": "nothing: a process leaves the job at its end",
    "start_timeline": "tfdist run --timeline",
    "stop_timeline": "tfdist run --timeline",
}
"""Equivalents in tfdist of names of Horovod, TensorFlow, and Keras 2."""

HOROVOD_ARGUMENTS = {
    "average_aggregated_gradients": "the default: backward_passes_per_step= applies the mean of the gradients",
    "gradient_predivide_factor": "nothing: means do not overflow where they are within the range of their dtype",
    "name": "nothing: calls are told apart by their places in the program",
    "num_groups": "nothing: gradients are packed by their sizes",
    "postscale_factor": "a multiplication of the result",
    "prescale_factor": "a multiplication of the tensor",
    "process_set": "group=tfdist.Group(…)",
}
"""Equivalents of arguments of Horovod's functions."""


def missing(module: str, name: str) -> AttributeError:
    """Returns the error about a name that a module does not have.

    Args:
        module: name of the module.
        name: the missing name.
    """
    here = _HERE.get(name)
    hint = (
        ""
        if here is None
        else f"; its equivalent in tfdist is {here} (docs/horovod.md and docs/multi_worker.md list others)"
    )
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def hint_unknown_arguments(here: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator by which a function's error about an unknown argument names the replacement.

    Args:
        here: description of the replacement, by the name of the unknown argument.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def hinting(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in here:
                    owner = function.__qualname__.removesuffix(".__init__")
                    raise TypeError(f"{owner}() has no argument {name}=; its equivalent is {here[name]}")
            return function(*args, **kwargs)

        return hinting

    return decorated
