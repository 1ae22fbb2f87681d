"""Probes of shared memory between processes, and the decision based on them."""

import os

import pytest

from tfdist.comm import probe


def offers(size, cells=64):
    return [{"cells": cells, "sums": rank != 1} for rank in range(size)]


def findings(size, apart=(), elsewhere=(), closed=()):
    """All find each other, but those pairs (one way): apart, on another machine, or whose arena is closed to it."""
    return [
        {
            "node": {
                str(other): "no" if (rank, other) in apart else ""
                for other in range(size)
                if other != rank and (rank, other) not in elsewhere
            },
            "arena": [other for other in range(size) if other != rank and (rank, other) not in closed],
        }
        for rank in range(size)
    ]


def test_mutually_reachable_ranks_share_one_node():
    sharing = probe.decide(offers(3), findings(3))
    assert sharing == probe.Sharing((0, 0, 0), (0, 0, 0), (True, False, True), (64, 64, 64), ())


def test_memory_reachable_one_way_only_is_not_shared():
    sharing = probe.decide(offers(2), findings(2, apart=[(1, 0)], closed=[(0, 1)]))
    assert sharing.nodes == (0, 1)
    assert sharing.arenas == (0, 1)
    assert sharing.reasons == ((0, 1, "no"),)


def test_ranks_share_a_node_only_if_all_pairs_share():
    """Rank 1 shares with 0 and 2, which do not share with each other."""
    sharing = probe.decide(offers(3), findings(3, apart=[(0, 2)]))
    assert sharing.nodes == (0, 0, 1)
    assert sharing.reasons == ((0, 2, "no"),)


def test_ranks_of_different_machines_need_no_reason():
    elsewhere = [(0, 1), (1, 0)]
    sharing = probe.decide(offers(2), findings(2, elsewhere=elsewhere, closed=elsewhere))
    assert sharing.nodes == (0, 1)
    assert sharing.reasons == ()


def test_a_node_has_as_many_cells_as_its_smallest_member_has_room_for():
    given = [{"cells": cells, "sums": False} for cells in (64, 16, 64)]
    assert probe.decide(given, findings(3, apart=[(0, 2), (1, 2)])).cells == (16, 16, 64)


def test_unknown_cell_counts_leave_nodes_to_mpi():
    sharing = probe.decide(offers(2, None), findings(2))
    assert (sharing.nodes, sharing.cells) == (None, None)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux")
def test_probes_find_each_other_and_leave_no_files(tmp_path):
    both = [probe.Probe("job", rank, folder=str(tmp_path)) for rank in range(2)]
    made = [rank_probe.offer() for rank_probe in both]
    results = [rank_probe.try_all(made) for rank_probe in both]
    for rank_probe in both:
        rank_probe.keep([0, 1])
        rank_probe.close()
    sharing = probe.decide(made, results)
    assert sharing.arenas == (0, 0)
    assert sharing.nodes == ((0, 0) if probe.ptrace_is_free() else (0, 1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux")
def test_a_file_of_another_job_is_not_taken_for_the_rank(tmp_path):
    here, there = (probe.Probe("job", rank, folder=str(tmp_path)) for rank in range(2))
    made = [here.offer(), there.offer()]
    (tmp_path / "job_1").write_bytes(b"x" * 16)
    assert here.try_all(made)["node"] == {"1": f"each has a {tmp_path} of its own"}
    here.close()
    there.close()


def test_reading_memory_with_wrong_content_gives_a_reason():
    assert probe.read_memory(os.getpid(), 0, b"x" * 16)
