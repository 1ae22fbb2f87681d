"""Finds out which cluster this process belongs to."""

from __future__ import annotations

import os
from typing import Any

from tfdist.cluster import launcher, spec
from tfdist.cluster.spec import Cluster
from tfdist.errors import ClusterSpecError
from tfdist.notices import warn_once

_FIRST_SLURM_PORT = 20000
_SLURM_PORTS = 10000
_PORTS_PER_JOB = 512


def discover(resolver: Any | None) -> Cluster | None:
    """Returns the cluster that this process is a task of.

    Args:
        resolver: a `ClusterResolver`, if the user gave one.

    Returns:
        The cluster; None under an MPI launcher, which decides by itself which processes take part, and for a single
        process.

    Raises:
        TypeError: ``resolver`` is not a `ClusterResolver`.
        ClusterSpecError: the description of the cluster contradicts itself.
    """
    if resolver is not None:
        if not callable(getattr(resolver, "cluster_spec", None)):
            raise TypeError(
                "cluster_resolver must be a tf.distribute.cluster_resolver.ClusterResolver, such as "
                f"SimpleClusterResolver(…); got {resolver!r}. Pass all other arguments by name"
            )
        return spec.from_resolver(resolver)
    if launcher.size() > 1:
        return None
    if (cluster := spec.from_tf_config(os.environ.get("TF_CONFIG", ""))) is not None:
        return cluster
    if _slurm_number("SLURM_STEP_NUM_TASKS", "1") > 1:
        return spec.from_resolver(_slurm_resolver())
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        warn_once(
            "tfdist: this process trains alone. RANK=%s and WORLD_SIZE=%s are set, as by torchrun, but tfdist does not "
            "read them: start it by `tfdist run -n %s`, mpiexec or srun, or with TF_CONFIG.",
            *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "WORLD_SIZE")),
        )
    return None


def resolver_of(cluster: Cluster | None) -> Any:
    """Returns the `ClusterResolver` that scripts get as ``strategy.cluster_resolver``.

    Args:
        cluster: result of `discover`. None gives a resolver without tasks, like `TFConfigClusterResolver` without
            TF_CONFIG.

    Returns:
        A `tf.distribute.cluster_resolver.SimpleClusterResolver`.
    """
    import tensorflow as tf

    jobs: dict[str, dict[int, str]] = {}
    place = (None, None) if cluster is None else (cluster.task.job, cluster.task.index)
    for task in () if cluster is None else cluster.tasks:
        jobs.setdefault(task.job, {})[task.index] = task.address
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=place[0], task_id=place[1], rpc_layer="grpc"
    )


def _slurm_resolver() -> Any:
    """Returns TensorFlow's resolver for a job step of srun, with different ports for jobs on the same machine."""
    import tensorflow as tf

    tasks = _slurm_number("SLURM_STEP_NUM_TASKS", "1")
    job = _slurm_number("SLURM_JOB_ID", "0")
    for name in ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"):
        if not os.environ.get(name):
            raise ClusterSpecError(
                f"SLURM_STEP_NUM_TASKS is {tasks}, but {name} is not set, as srun sets it: start the tasks with srun, "
                "or unset SLURM_STEP_NUM_TASKS"
            )
    return tf.distribute.cluster_resolver.SlurmClusterResolver(
        jobs={"worker": tasks},
        port_base=_FIRST_SLURM_PORT + job * _PORTS_PER_JOB % _SLURM_PORTS,
        gpus_per_node=tasks,  # only limits the tasks of a node; GPUs are pinned by local rank
        gpus_per_task=1,
        auto_set_gpu=False,
    )


def _slurm_number(name: str, default: str) -> int:
    """Returns the value of an environment variable of srun.

    Raises:
        ClusterSpecError: the value is not a number.
    """
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise ClusterSpecError(f"{name} must be a number, as srun sets it; got {text!r}")
    return int(text)
