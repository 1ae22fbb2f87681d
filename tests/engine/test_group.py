import numpy as np
import pytest

from tfdist.cluster.settings import Timeouts
from tfdist.collectives import ring
from tfdist.collectives.cost import Calibration, Level
from tfdist.comm.local import LocalWorld
from tfdist.engine.engine import Engine
from tfdist.engine.group import ProcessGroup
from tfdist.errors import TfdistError

SLOW_NETWORK = Calibration(Level(1e-6, 1e-10), Level(1e-3, 1e-7), 1e-10, 0.0)


def engine(rank=2, hosts=(0, 0, 1, 1, 2)):
    """Returns the engine of one of several processes, which is not connected to the others."""
    return Engine(LocalWorld(len(hosts), hosts).communicator(rank), None, Timeouts())


@pytest.mark.parametrize("algorithm", ["ring", "mpi"])
def test_all_processes_in_their_order_are_the_world(algorithm):
    for group in (ProcessGroup(engine(), None, algorithm), ProcessGroup(engine(), (0, 1, 2, 3, 4), algorithm)):
        assert group.is_world
        assert (group.rank, group.size, group.members) == (2, 5, (0, 1, 2, 3, 4))
        assert group.hosts == (0, 0, 1, 1, 2)


@pytest.mark.parametrize("members", [(2,), (4, 2), (4, 3, 2, 1, 0)])
def test_subset_or_reordered_members_are_not_the_world(members):
    group = ProcessGroup(engine(), members)
    assert not group.is_world
    assert (group.rank, group.size) == (members.index(2), len(members))
    assert group.hosts == tuple((0, 0, 1, 1, 2)[member] for member in members)
    assert str(group) == f"Group({list(members)})"
    with pytest.raises(ValueError, match="'mpi' runs among all processes of a job"):
        ProcessGroup(engine(), members, "mpi")


def test_group_without_the_own_rank_raises():
    with pytest.raises(ValueError, match="not in tuple"):
        ProcessGroup(engine(), (0, 1))


def test_the_first_member_writes():
    assert [ProcessGroup(engine(), members).is_writer for members in (None, (2, 0), (0, 2))] == [False, True, False]


def test_a_subgroup_is_of_the_groups_own_ranks():
    group = ProcessGroup(engine(), (4, 2, 0), "tree")
    inner = group.subgroup((1, 0))
    assert inner.members == (2, 4)
    assert (inner.rank, inner.algorithm) == (0, "tree")
    assert not inner.is_world
    assert ProcessGroup(engine(), (1, 0, 2, 4, 3)).subgroup((1, 0, 2, 4, 3)).is_world


def test_using_returns_a_group_with_another_algorithm():
    group = ProcessGroup(engine(), (2, 4))
    other = group.using("butterfly", None)
    assert (other.algorithm, other.members, other.engine) == ("butterfly", (2, 4), group.engine)
    assert group.algorithm == "ring"
    with pytest.raises(ValueError, match="got 'rings'"):
        group.using("rings", None)
    with pytest.raises(ValueError, match="not in a group of them"):
        group.using("mpi", None)


def test_numbers_are_counted_per_kind_and_group():
    local_engine = engine()
    counted = [
        (group, kind, group.number(kind))
        for group, kind in [
            (ProcessGroup(local_engine), "strategy"),
            (ProcessGroup(local_engine), "strategy"),
            (ProcessGroup(local_engine), "exchange"),
            (ProcessGroup(local_engine, (2, 0)), "strategy"),
            (ProcessGroup(local_engine, (0, 2)), "strategy"),  # in another order it is another group
            (ProcessGroup(local_engine, (0, 1, 2, 3, 4)), "strategy"),
        ]
    ]
    assert [number for _, _, number in counted] == [0, 1, 0, 0, 0, 2]
    assert ProcessGroup(engine()).number("strategy") == 0, "of another process"


def test_auto_goes_by_the_groups_machines_and_its_calibration():
    two_hosts = ProcessGroup(engine(hosts=(0, 0, 1, 1)), (0, 1, 2, 3), "auto", SLOW_NETWORK)
    assert two_hosts.choose(64 << 20) == "hierarchical"
    one_host = two_hosts.subgroup((2, 3))
    assert one_host.choose(64 << 20) != "hierarchical"
    assert ProcessGroup(engine(), None, "tree", SLOW_NETWORK).choose(64 << 20) == "tree"


def test_choose_in_turn_replaces_mpi_by_ring():
    assert ProcessGroup(engine(), None, "mpi").choose(8) == "mpi"
    assert ProcessGroup(engine(), None, "mpi").choose_in_turn(8) == "ring"
    assert ProcessGroup(engine(), None, "tree").choose_in_turn(8) == "tree"


def test_group_of_one_runs_without_a_server():
    """Not even the server is asked, because there is nothing to agree on."""
    group = ProcessGroup(engine(), (2,))
    buffer = np.full(3, 5.0)
    assert group.run("sum", ring.all_reduce(buffer)) is None
    pending = group.post("sum", ring.all_reduce(buffer), overlaps=False)
    group.wait(pending)
    assert (pending.call, pending.name) == (1, "sum in group [2]")
    assert buffer.tolist() == [5.0] * 3


def test_engine_failure_fails_its_groups():
    local_engine = engine()
    groups = [ProcessGroup(local_engine), ProcessGroup(local_engine, (2,))]
    assert [group.failure for group in groups] == [None, None]
    local_engine.fail(TfdistError("lost"))
    assert [str(group.failure) for group in groups] == ["lost", "lost"]
    with pytest.raises(TfdistError, match="lost"):
        groups[1].run("sum", ring.all_reduce(np.ones(3)))


def test_take_and_join_are_passed_to_the_engine():
    group = ProcessGroup(engine(rank=0, hosts=(0,)))
    assert group.take(24).nbytes == 24
    assert group.join() == 0
