"""The worlds of tasks without MPI; `tests/multiprocess` has those with it."""

import sys

import pytest

from tests.runtime.jobs import TIMEOUTS, cluster_of, seen_by
from tfdist.errors import ClusterSpecError
from tfdist.runtime import job, membership, world

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("enter", [world.enter, world.train])
def test_single_process_has_rank_zero_and_no_job(enter):
    for cluster in (None, cluster_of("chief", chief=1), cluster_of("worker", worker=1)):
        entered = enter(cluster, TIMEOUTS)
        assert (entered.rank, entered.size, entered.local_rank, entered.local_size) == (0, 1, 0, 1)
        assert entered.role == "chief"
        assert entered.group.members == (0,)
        assert entered.all_gather("name", "value") == ["value"]
    assert job._entered is None, "there is no job to enter"
    assert world.current().size == 1


@pytest.mark.parametrize("role", ["ps", "evaluator"])
def test_a_task_without_a_rank_enters_without_mpi(role):
    cluster = cluster_of("chief", chief=1, worker=1, **{role: 1})
    chief = membership.of_task(seen_by(cluster, "chief"), TIMEOUTS)
    try:
        entered = world.enter(seen_by(cluster, role), TIMEOUTS)
        assert (entered.rank, entered.size, entered.role) == (-1, 2, role)
        assert job._entered.control.task == 2
        assert job._entered.started is None
        with pytest.raises(ClusterSpecError, match=f"of the job '{role}': it has no rank and takes no part"):
            entered.group  # noqa: B018
        assert world.current() is entered
        job._entered.leave(None)
    finally:
        chief.close()


def test_a_chief_alone_with_other_roles_enters_without_mpi():
    entered = world.enter(cluster_of("chief", chief=1, ps=1), TIMEOUTS)
    assert (entered.rank, entered.size, entered.role) == (0, 1, "chief")
    assert job._entered.started is None
    assert entered.group.members == (0,)


def test_a_chief_alone_with_parameter_servers_enters_the_job_to_train():
    """Its embeddings are on them, and they learn from the job when it is over."""
    entered = world.train(cluster_of("chief", chief=1, ps=1), TIMEOUTS)
    assert (entered.rank, entered.size) == (0, 1)
    assert job._entered is not None


def test_an_evaluator_trains_alone():
    """As in TensorFlow, where it does not talk to the others; it may start before them and end after them."""
    entered = world.train(cluster_of("evaluator", chief=1, worker=1, evaluator=1), TIMEOUTS)
    assert (entered.rank, entered.size) == (0, 1)
    assert job._entered is None


@pytest.mark.parametrize(("task", "words"), [(("ps", 0), "a parameter server"), (("worker", 9), "does not list")])
def test_collective_training_raises_on_servers_and_unlisted_workers(task, words):
    cluster = seen_by(cluster_of("chief", chief=1, worker=1, ps=1), *task)
    with pytest.raises(ClusterSpecError, match=f"this process is {task[0]} {task[1]}.*{words}"):
        world.train(cluster, TIMEOUTS)


def test_entering_loads_no_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    entered = world.enter(cluster_of("chief", chief=1, ps=1), TIMEOUTS)
    assert entered.size == 1
