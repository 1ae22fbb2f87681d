"""Chooses the devices of its machine that a process computes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import tensorflow as tf

from tfdist.cluster.spec import Cluster
from tfdist.comm.page_locks import page_locks
from tfdist.strategies.devices import device_names

_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""TensorFlow's environment variable, by which users decide on memory growth of all GPUs."""


def own_devices(asked: Sequence[str] | None, local_rank: int, local_size: int) -> list[str]:
    """Returns the devices that this process computes on. With GPUs, buffers that are copied to them become page-locked.

    Each process gets its share of a machine's GPUs, and all others are hidden from TensorFlow, unless the user has
    chosen the visible ones. Where processes may share a GPU, TensorFlow allocates its memory as needed instead of all
    at once, unless the user has decided on memory growth. Nothing here initializes a GPU.

    Args:
        asked: names of devices that the user wants; None uses GPUs, or the CPU if there are none.
        local_rank: this process's rank on its machine.
        local_size: the number of processes on the machine.

    Raises:
        RuntimeError: TensorFlow already uses GPUs that other processes should get; or the machine has TPUs and no GPU,
            and the user has named no device.
    """
    chosen = _chosen(asked, local_rank, local_size)
    if any("gpu" in name.lower() for name in chosen):
        first = tf.config.get_visible_devices("GPU")[0]
        page_locks.device = tf.config.list_physical_devices("GPU").index(first)
    return chosen


def _chosen(asked: Sequence[str] | None, local_rank: int, local_size: int) -> list[str]:
    if asked is not None and not any("gpu" in name.lower() for name in asked):
        return list(asked)
    gpus = tf.config.get_visible_devices("GPU")
    share_memory(local_size, 1 if asked is not None else None)
    if asked is not None:
        return list(asked)
    if local_size > 1 and len(gpus) > 1 and gpus == tf.config.list_physical_devices("GPU"):
        share = max(1, len(gpus) // local_size)
        first = (local_rank * share) % len(gpus)
        try:
            tf.config.set_visible_devices(gpus[first : first + share], "GPU")
        except RuntimeError as error:
            raise RuntimeError(
                "TensorFlow already uses a GPU, so that processes cannot be given different GPUs: make the strategy "
                f"first, right after the imports ({error})"
            ) from None
    if not gpus and tf.config.list_physical_devices("TPU"):
        raise RuntimeError(
            "this machine has TPUs, on which tfdist does not train: its sums pass through functions on the host, which "
            "programs compiled for TPUs cannot call. Use tf.distribute.TPUStrategy for the TPUs of one machine; or "
            'train on the CPU: pass devices=["CPU:0"] (device="CPU:0" with parameter servers).'
        )
    return device_names.logical("GPU") or ["CPU:0"]


def share_memory(local_size: int, count: int | None = None) -> None:
    """Lets TensorFlow allocate the memory of GPUs as needed, where several processes may share one.

    Does nothing if the user has set memory growth for a GPU, or has divided one into logical devices: TensorFlow
    requires the same setting for all GPUs.

    Args:
        local_size: the number of processes on the machine.
        count: the number of GPUs that the processes are spread over; by default the visible ones.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if local_size <= (len(gpus) if count is None else count) or _GROWTH in os.environ:
        return
    decided = [tf.config.experimental.get_memory_growth(gpu) is not None for gpu in gpus]
    divided = [bool(tf.config.get_logical_device_configuration(gpu)) for gpu in gpus]
    if not any(decided + divided):
        for gpu in gpus:
            with contextlib.suppress(RuntimeError):  # TensorFlow uses it already
                tf.config.experimental.set_memory_growth(gpu, True)


def place_on_host(cluster: Cluster | None) -> tuple[int, int]:
    """Returns a task's local rank in a job with parameter servers, and the number of such tasks on its host.

    Parameter servers do not count. Hosts are told apart by their names in the cluster, because the tasks of such a job
    come and go.

    Args:
        cluster: the task's cluster; None for a process that trains alone.
    """
    if cluster is None:
        return 0, 1
    host = cluster.task.address.rpartition(":")[0]
    mine = [task for task in cluster.tasks if task.job != "ps" and task.address.rpartition(":")[0] == host]
    if cluster.task not in mine:  # a worker that the cluster does not name: its host is unknown
        return cluster.task.index, cluster.task.index + 1
    return mine.index(cluster.task), len(mine)


def hide_gpus() -> None:
    """Hides GPUs from a parameter server, which computes on the CPU and leaves the memory of GPUs to workers."""
    with contextlib.suppress(RuntimeError):  # TensorFlow uses them already
        tf.config.set_visible_devices([], "GPU")
