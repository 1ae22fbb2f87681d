import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import ring
from tfdist.collectives.all_gather import all_gather
from tfdist.comm.group import GroupCommunicator
from tfdist.comm.local import LocalWorld


def test_ranks_are_places_among_the_members():
    world = LocalWorld(5, hosts=(0, 0, 1, 1, 2), segment_bytes=77)
    group = GroupCommunicator(world.communicator(3), [4, 0, 3])
    assert (group.rank, group.size) == (2, 3)
    assert group.hosts == (2, 0, 1)
    assert group.segment_bytes == 77


def test_group_without_the_own_rank_raises():
    with pytest.raises(ValueError, match="not in tuple"):
        GroupCommunicator(LocalWorld(3).communicator(1), [0, 2])


def test_transfers_are_between_the_members():
    world = LocalWorld(4)
    source, target = (GroupCommunicator(world.communicator(rank), [3, 1]) for rank in (1, 3))
    buffer, combined = np.zeros(3), np.full(3, 10.0)
    requests = [
        target.receive(buffer, 1, 5),
        target.receive_combined(combined, combined, np.subtract, 1, 6),
    ]
    assert not target.completed(requests)
    assert source.completed([source.send(np.arange(3.0), 0, 5), source.send(np.arange(3.0), 0, 6)])
    assert target.completed(requests)
    target.progress()
    assert buffer.tolist() == [0, 1, 2]
    assert combined.tolist() == [10, 9, 8]


def test_group_and_parent_share_message_counts():
    """The group's messages count for it, and its own for the group."""
    whole = LocalWorld(3).communicator(0)
    group = GroupCommunicator(whole, [0, 2])
    group.send(np.ones(4, np.float32), 1, 0)
    whole.send(np.ones(2, np.float32), 1, 0)
    assert (whole.messages_sent, whole.bytes_sent) == (group.messages_sent, group.bytes_sent) == (2, 24)


def test_disjoint_groups_use_one_tag_at_once():
    groups = [(4, 0, 2), (1, 3)]
    buffers = [np.full(7, 2.0**rank) for rank in range(5)]

    def plan(rank):
        members = groups[rank % 2]
        return lambda comm, tag: ring.all_reduce(buffers[rank])(GroupCommunicator(comm, members), tag)

    simulate(5, plan)
    for rank, buffer in enumerate(buffers):
        np.testing.assert_array_equal(buffer, sum(2.0**member for member in groups[rank % 2]))


def test_nested_group_numbers_members_by_outer_ranks():
    """Members are numbered by their places in the outer one."""
    outer, inner = (3, 1, 0), (2, 0)  # the ranks 0 and 3, in this order
    parts = {rank: [np.full(2, float(rank)) for _ in inner] for rank in (0, 3)}

    def plan(rank):
        def schedule(comm, tag):
            if rank in parts:
                group = GroupCommunicator(GroupCommunicator(comm, outer), inner)
                yield from all_gather(parts[rank])(group, tag)

        return schedule

    simulate(4, plan)
    for gathered in parts.values():
        np.testing.assert_array_equal(gathered, [[0, 0], [3, 3]])


def test_group_takes_memory_from_its_parent():
    whole = LocalWorld(2).communicator(1)
    memory = np.zeros(8, np.uint8)
    whole.take = lambda nbytes: memory[:nbytes]
    assert np.shares_memory(GroupCommunicator(whole, [1]).take(4), memory)
