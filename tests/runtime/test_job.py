import dataclasses

import pytest

from tests.runtime.jobs import TIMEOUTS, cluster_of
from tfdist.errors import ClusterSpecError
from tfdist.runtime import job

pytestmark = pytest.mark.usefixtures("fresh")


def test_entering_twice_returns_the_same_membership():
    cluster = cluster_of("worker", worker=2)
    entered = job.enter(cluster, TIMEOUTS)
    assert job.enter(cluster, TIMEOUTS) is entered


def test_entering_a_second_job_raises():
    job.enter(cluster_of("worker", worker=2), TIMEOUTS)
    with pytest.raises(ClusterSpecError, match=r"has already entered a job .* and can enter only one; got"):
        job.enter(cluster_of("worker", worker=2), TIMEOUTS)


def test_mixing_elastic_and_fixed_workers_raises():
    cluster = cluster_of("worker", worker=2)
    job.enter(cluster, TIMEOUTS)
    with pytest.raises(
        ClusterSpecError, match=r"QuorumStrategy.* cannot be used in one job with .* Leave out tfdist\.init"
    ):
        job.enter(dataclasses.replace(cluster, has_elastic_workers=True), TIMEOUTS)


def test_a_process_that_has_left_may_enter_again():
    """As in a notebook, after MPI could not be started."""
    first = job.enter(cluster_of("worker", worker=2), TIMEOUTS)
    first.abandon(ValueError("no MPI"))
    second = job.enter(cluster_of("worker", worker=2), TIMEOUTS)
    assert second is not first
    assert not second.is_closed
