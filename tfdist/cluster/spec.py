"""Reads and checks the description of the cluster in TF_CONFIG or a `ClusterResolver`."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.errors import ClusterSpecError

CHIEF_JOBS = ("chief", "master")
"""Possible jobs of a chief, the task with rank 0. SageMaker and older TFJobs call it ``master``."""

TRAINING_JOBS = (*CHIEF_JOBS, "worker")
"""Jobs whose tasks have ranks, in the order of the ranks."""

OTHER_JOBS = ("ps", "evaluator")
"""Jobs whose tasks belong to the cluster but have no rank: parameter servers, and evaluators, which run alone."""

_LIKE_CLUSTER = ("cluster", "clusters", "clusterspec", "cluster_spec")

_EXAMPLE = 'for example {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


@dataclass(frozen=True)
class Task:
    """One task of a cluster: its job, its index in the job, and its ``host:port``."""

    job: str
    index: int
    address: str

    def __str__(self) -> str:
        return f"{self.job} {self.index} ({self.address})" if self.address else f"{self.job} {self.index}"


@dataclass(frozen=True)
class Cluster:
    """All tasks of a cluster, and this process's task among them.

    A task's number is its place in ``tasks``. Training tasks come first, so that their numbers are their ranks.

    Attributes:
        tasks: the chief, the workers, the parameter servers, the evaluators.
        task: this process's own task. It is not in ``tasks`` if it is an evaluator that the cluster does not list, or
            a worker in addition to the listed ones of a cluster with parameter servers.
        has_elastic_workers: whether this task's strategy trains with the tasks that are there, and needs no MPI.
    """

    tasks: tuple[Task, ...]
    task: Task
    has_elastic_workers: bool = False

    @property
    def size(self) -> int:
        """Number of tasks with a rank."""
        return sum(task.job in TRAINING_JOBS for task in self.tasks)

    @property
    def number(self) -> int | None:
        """This task's number; None if the cluster does not list it."""
        return self.tasks.index(self.task) if self.task in self.tasks else None

    @property
    def rank(self) -> int | None:
        """This task's rank; None if it has none."""
        return self.number if self.number is not None and self.number < self.size else None

    @property
    def is_elastic(self) -> bool:
        """Whether tasks may come again, and new tasks may come, after the start, as with parameter servers."""
        return self.has_elastic_workers or any(task.job == "ps" for task in self.tasks)

    def digest(self) -> str:
        """Returns a fingerprint, by which tasks check that they were given the same cluster."""
        tasks: list[Any] = [[task.job, task.index, task.address] for task in self.tasks]
        text = json.dumps([*tasks, "comes and goes"] if self.has_elastic_workers else tasks)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_tf_config(text: str) -> Cluster | None:
    """Parses and checks the value of TF_CONFIG.

    Args:
        text: JSON with the keys ``cluster`` and ``task``, as TensorFlow defines it, or Kubeflow's ``sparseCluster``
            instead of ``cluster``; other keys are ignored. The index may be a string.

    Returns:
        The cluster; None when TF_CONFIG names none: an empty text, an empty object, or a task without a cluster, which
        schedulers give to a job with a single task.

    Raises:
        ClusterSpecError: the text is not JSON of this form, or contradicts itself.
    """
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterSpecError(f"TF_CONFIG is not JSON ({error}). Expected {_EXAMPLE}; got: {_short(text)}") from None
    if not isinstance(config, dict):
        raise ClusterSpecError(f"TF_CONFIG must be a JSON object, {_EXAMPLE}; got: {_short(text)}")
    for key in ("cluster", "sparseCluster", "task"):
        if not isinstance(config.get(key, {}), dict):
            raise ClusterSpecError(
                f"TF_CONFIG must hold an object under {key!r}. Expected {_EXAMPLE}; got: {_short(text)}"
            )
    jobs = config.get("cluster") or config.get("sparseCluster") or {}
    if not any(jobs.values()):
        if meant := [key for key, value in config.items() if _looks_like_a_cluster(key, value)]:
            raise ClusterSpecError(
                f"TF_CONFIG holds no tasks under 'cluster', but {_short(repr(meant[0]))}, which looks like a cluster. "
                f"Expected {_EXAMPLE}; got: {_short(text)}"
            )
        return None
    if "task" not in config:
        raise ClusterSpecError(f"TF_CONFIG lacks 'task'. Expected {_EXAMPLE}; got: {_short(text)}")
    task = config["task"]
    job, index = task.get("type"), task.get("index")
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    for key, kind, name, value in (("type", str, "a text", job), ("index", int, "a whole number", index)):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ClusterSpecError(f"TF_CONFIG's task must hold {name} under {key!r}. Expected {_EXAMPLE}; got: {task}")
    return from_jobs(jobs, job, index, source="TF_CONFIG")


def _looks_like_a_cluster(key: str, value: Any) -> bool:
    """Returns whether a key of TF_CONFIG other than ``cluster`` and ``task`` is meant to name tasks."""
    if key in ("cluster", "sparseCluster", "task") or not value:
        return False
    is_job = key in (*TRAINING_JOBS, *OTHER_JOBS)
    return is_job or bool(difflib.get_close_matches(key.lower(), _LIKE_CLUSTER, cutoff=0.8)) or _has_addresses(value)


def _has_addresses(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_addresses, value.values()))
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(address, str) and re.fullmatch(r"\S+:\d+", address) for address in value)


def from_resolver(resolver: Any) -> Cluster | None:
    """Reads the cluster from any `tf.distribute.cluster_resolver.ClusterResolver`.

    Args:
        resolver: resolver with ``cluster_spec()``, ``task_type`` and ``task_id``.

    Returns:
        The cluster, or None when the resolver names no tasks.

    Raises:
        ClusterSpecError: the resolver's cluster contradicts itself.
    """
    jobs = resolver.cluster_spec().as_dict()
    if not jobs:
        return None
    if resolver.task_type is None or resolver.task_id is None:
        raise ClusterSpecError(
            f"{type(resolver).__name__} gives a cluster {jobs} but not this process's own task: "
            f"set its task_type and task_id (got {resolver.task_type!r}, {resolver.task_id!r})."
        )
    return from_jobs(jobs, resolver.task_type, resolver.task_id, source=type(resolver).__name__)


def from_jobs(jobs: Mapping[str, Any], job: str, index: int, source: str) -> Cluster:
    """Checks a mapping of job names to addresses, and this process's place in it.

    Args:
        jobs: addresses ``host:port`` by job, each as a list or as a mapping from index to address, which may have gaps.
            A job without tasks is ignored.
        job: this process's job.
        index: this process's index in its job.
        source: name of the place that the description comes from, for error messages.

    Returns:
        The cluster.

    Raises:
        ClusterSpecError: an unknown job, a missing or duplicate address, an index out of range.
    """
    known = (*TRAINING_JOBS, *OTHER_JOBS)
    jobs = {name: addresses for name, addresses in jobs.items() if addresses not in ([], (), {}, None)}
    for name in (*jobs, job):
        if name not in known:
            raise ClusterSpecError(f"{source}: unknown job {name!r}. Expected one of {', '.join(known)}.")
    tasks = {name: _tasks(source, name, jobs[name]) for name in jobs}
    addresses: dict[str, Task] = {}
    for task in (task for group in tasks.values() for task in group):
        other = addresses.setdefault(task.address, task)
        if other is not task:
            raise ClusterSpecError(
                f"{source}: the address {task.address} is given to both {other.job} {other.index} and "
                f"{task.job} {task.index}. Every task needs an address of its own."
            )
    chiefs = [task for name in CHIEF_JOBS for task in tasks.get(name, ())]
    if len(chiefs) > 1:
        raise ClusterSpecError(f"{source}: there can be one chief; got {len(chiefs)}: {', '.join(map(str, chiefs))}.")
    listed = tuple(task for name in known for task in tasks.get(name, ()))
    extra = job == "evaluator" and not tasks.get(job)
    extra |= job == "worker" and "ps" in tasks and all(task.index != index for task in tasks.get(job, ()))
    this_task = Task(job, index, "") if extra else _own(source, tasks.get(job, []), job, index)
    if job != "evaluator" and not any(task.job in TRAINING_JOBS for task in listed):
        raise ClusterSpecError(f"{source}: the cluster must name a chief or a worker, which train; got {jobs}.")
    if this_task.index > 0 and listed == (this_task,):
        raise ClusterSpecError(
            f"{source}: this process is {this_task}, but the cluster names no other task. List all tasks: the partial "
            "cluster that some schedulers give to workers of parameter servers (a TFJob with enableDynamicWorker) is "
            "not enough to train together."
        )
    return Cluster(listed, this_task)


def _own(source: str, tasks: list[Task], job: str, index: int) -> Task:
    for task in tasks:
        if task.index == index:
            return task
    have = f"{len(tasks)} task(s)"
    if tasks:
        have += f", with the indices {_short(', '.join(str(task.index) for task in tasks))},"
    raise ClusterSpecError(f"{source}: this process is {job} {index}, but the cluster has {have} of the job {job!r}.")


def _tasks(source: str, job: str, addresses: Any) -> list[Task]:
    if isinstance(addresses, Mapping):
        for key in addresses:
            if not str(key).isdecimal():
                raise ClusterSpecError(f"{source}: the job {job!r} must give addresses by index; got: {addresses!r}")
        by_index = sorted((int(key), address) for key, address in addresses.items())
    elif isinstance(addresses, (list, tuple)):
        by_index = list(enumerate(addresses))
    else:
        raise ClusterSpecError(f"{source}: the job {job!r} must list its tasks' addresses; got: {addresses!r}")
    if len(dict(by_index)) < len(by_index):  # as 1 and 01
        raise ClusterSpecError(f"{source}: the job {job!r} must give each index once; got: {addresses!r}")
    return [Task(job, index, _checked(source, job, index, address)) for index, address in by_index]


def _checked(source: str, job: str, index: int, address: Any) -> str:
    bare = address.removeprefix("grpc://") if isinstance(address, str) else ""
    host, _, port = bare.rpartition(":")
    if "/" in host or not _is_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ClusterSpecError(f"{source}: {job} {index} needs an address host:port; got: {address!r}")
    return bare


def _is_host(name: str) -> bool:
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port`` (or ``[v6]:port``) into the host and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
