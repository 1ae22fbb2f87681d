"""Which devices of its machine a process computes on."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from tfdist.cluster.spec import Cluster


def default_devices(local_rank: int, local_size: int) -> list[str]:
    """This process's share of the machine's GPUs, or its CPU. All other GPUs are hidden from TensorFlow.

    Args:
        local_rank: this process's rank on its machine.
        local_size: the number of processes on the machine.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return ["CPU:0"]
    if local_size > 1 and len(gpus) > 1:
        share = max(1, len(gpus) // local_size)
        first = (local_rank * share) % len(gpus)
        try:
            tf.config.set_visible_devices(gpus[first : first + share], "GPU")
        except RuntimeError as error:
            raise RuntimeError(
                "the strategy must be made before TensorFlow uses a GPU, to pin one to each process: make it the "
                f"first thing after the imports ({error})"
            ) from None
    return [f"GPU:{index}" for index in range(len(tf.config.get_visible_devices("GPU")))]


def place_on_host(cluster: Cluster | None) -> tuple[int, int]:
    """The local rank of a task that trains in a job with parameter servers, and how many such tasks its host has.

    Hosts are told apart by their names in the cluster, as the tasks of such a job come and go.

    Args:
        cluster: of the task; None for a process alone.
    """
    if cluster is None:
        return 0, 1
    host = cluster.task.address.rpartition(":")[0]
    mine = [task for task in cluster.tasks if task.job != "ps" and task.address.rpartition(":")[0] == host]
    if cluster.task not in mine:  # a worker that the cluster does not name: where it is, nobody knows
        return cluster.task.index, cluster.task.index + 1
    return mine.index(cluster.task), len(mine)


def hide_gpus() -> None:
    """A parameter server computes on the CPU, and leaves the memory of GPUs to workers."""
    with contextlib.suppress(RuntimeError):  # TensorFlow uses them already
        tf.config.set_visible_devices([], "GPU")
