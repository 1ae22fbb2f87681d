"""Clusters on ports of this machine, and what a process has entered, to be left again."""

import contextlib
import socket

import pytest

from tfdist.cluster import spec
from tfdist.cluster.settings import Timeouts
from tfdist.runtime import job, world

TIMEOUTS = Timeouts(start=10, heartbeat=10)


def cluster_of(task, index=0, **jobs):
    """The cluster as one task sees it; each job with so many tasks as ``jobs`` says."""
    with contextlib.ExitStack() as stack:
        listeners = {
            name: [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            for name, count in jobs.items()
        }
        addresses = {
            name: [f"127.0.0.1:{listener.getsockname()[1]}" for listener in made] for name, made in listeners.items()
        }
    return spec.from_jobs(addresses, task, index, source="test")


def seen_by(cluster, task, index=0):
    """The same cluster as another task sees it."""
    jobs = {}
    for member in cluster.tasks:
        jobs.setdefault(member.job, {})[member.index] = member.address
    return spec.from_jobs(jobs, task, index, source="test")


@pytest.fixture
def fresh(monkeypatch):
    """A process that has entered nothing, and leaves what it enters; it has no launcher and its hooks stay."""
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(job, "_entered", None)
    monkeypatch.setattr(job.leave, "arrange", lambda membership: None)
    monkeypatch.setenv("TFDIST_SECRET", "a secret")
    for name in world.launcher._SIZES:
        monkeypatch.delenv(name, raising=False)
    yield
    if job._entered is not None and not job._entered.is_closed:
        job._entered.leave(None)
