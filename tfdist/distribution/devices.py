"""The functions of Keras's backend that tell `keras.distribution` which processes and devices there are."""

from __future__ import annotations

import json
import os
from typing import Any

import tensorflow as tf

from tfdist import initialization
from tfdist.cluster import discovery, launcher
from tfdist.errors import ClusterSpecError
from tfdist.private.keras import tf_distribution

_local_devices = tf_distribution.list_devices


def initialize(
    job_addresses: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Enters the job; what `keras.distribution.initialize` calls.

    The job is that of the launcher or of TF_CONFIG, as for all of tfdist. Without one, the arguments describe it.

    Args:
        job_addresses: the addresses ``host:port`` of all processes, with commas between; that of the first is enough.
        num_processes: the number of processes.
        process_id: this process's rank.

    Raises:
        ClusterSpecError: the arguments contradict each other, or the job that this process was started in.
        RuntimeError: this process is in use without others already.
    """
    if job_addresses and launcher.size() == 1 and discovery.discover(None) is None:
        addresses = _all_addresses(job_addresses.split(","), num_processes)
        if len(addresses) > 1:
            _describe(addresses, process_id)
    for name, given, actual in (
        ("num_processes", num_processes, count()),
        ("process_id", process_id, process()),
    ):
        if given is not None and given != actual:
            raise ClusterSpecError(
                f"keras.distribution.initialize({name}={given}): this process was started as rank {process()} of a "
                f"job of {count()}. Leave out {name}, or start the job with what it says."
            )


def count() -> int:
    """Returns the number of processes that train together, after entering the job."""
    initialization.init()
    return initialization.size()


def process() -> int:
    """Returns this process's rank, after entering the job."""
    initialization.init()
    return initialization.rank()


def names(device_type: str | None = None) -> list[str]:
    """Returns the names of the devices: one for each process of a job of several, else those of this process.

    Args:
        device_type: ``"cpu"``, ``"gpu"`` or ``"tpu"``; by default GPUs, or CPUs where this process has none.
    """
    if count() == 1:
        return list(_local_devices(device_type))
    has_gpu = bool(tf.config.get_visible_devices("GPU"))  # without initializing one that another process will get
    kind = (device_type or ("gpu" if has_gpu else "cpu")).lower()
    return [f"{kind}:{rank}" for rank in range(count())] if kind == "cpu" or (kind == "gpu" and has_gpu) else []


def number_of(device_type: str | None = None) -> int:
    """Returns the number of devices of a type; see `names`."""
    return len(names(device_type))


def of_mesh(mesh: Any) -> list[str] | None:
    """Returns those devices of a mesh that this process computes on; None leaves the choice to the strategy.

    Args:
        mesh: a `keras.distribution.DeviceMesh`.

    Raises:
        ValueError: the mesh does not consist of all devices, each once, or in one process of some of its devices.
    """
    given = [str(device).lower() for device in mesh.devices.ravel()]
    kind = given[0].partition(":")[0]
    known = names(kind)
    if count() == 1 and set(given) <= set(known) and len(set(given)) == len(given):
        return [device.upper() for device in given]
    if sorted(given) != sorted(known):
        what = f"this job of {count()} processes has, one for each process," if count() > 1 else "this process has"
        raise ValueError(
            f"keras.distribution: the {mesh} is of the devices {_listed(given)}; {what} {_listed(known) or 'none'}. "
            f"Make the mesh of all that keras.distribution.list_devices() returns: each process has one part of it."
        )
    return ["CPU:0"] if kind == "cpu" else None


def _all_addresses(addresses: list[str], num_processes: int | None) -> list[str]:
    """Returns an address for each process. The others' are not needed, as they tell theirs to the first."""
    first, _, port = addresses[0].rpartition(":")
    if len(addresses) == 1 and num_processes is not None and port.isdigit():
        return [f"{first}:{int(port) + rank}" for rank in range(num_processes)]
    if num_processes not in (None, len(addresses)):
        raise ClusterSpecError(
            f"keras.distribution.initialize: num_processes={num_processes}, but job_addresses has {len(addresses)} "
            "addresses. Give one for each process, or that of process 0 with its port."
        )
    return addresses


def _describe(addresses: list[str], process_id: int | None) -> None:
    """Describes the job as TF_CONFIG does, for all that is made in this process."""
    if process_id is None or not 0 <= process_id < len(addresses):
        raise ClusterSpecError(
            f"keras.distribution.initialize: process_id must be this process's rank, from 0 to {len(addresses) - 1}; "
            f"got {process_id}. Give it, or set KERAS_DISTRIBUTION_PROCESS_ID."
        )
    if initialization.is_initialized():
        raise RuntimeError(
            "keras.distribution.initialize: this process trains alone already, as keras.distribution.list_devices or "
            "something else of tfdist was called. Call initialize first."
        )
    task = {"type": "worker", "index": process_id}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + ", …" * (len(names) > 8)
