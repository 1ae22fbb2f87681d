"""Ranks in a mesh."""

import pytest

from tfdist.pipeline.mesh import Mesh


def test_ranks_map_to_workers_and_replicas(ranks):
    def work(group):
        mesh = Mesh(group, 2)
        return mesh.worker, mesh.replica, mesh.pipeline.members, mesh.replicas.members, mesh.rank(2, 1)

    found = ranks(6)(work)
    assert [one[:2] for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [one[2] for one in found[:2]] == [(0, 2, 4), (1, 3, 5)]
    assert [one[3] for one in found[::2]] == [(0, 1), (2, 3), (4, 5)]
    assert all(one[4] == 5 for one in found)


def test_data_that_does_not_divide_processes_raises(ranks):
    def work(group):
        with pytest.raises(ValueError, match=r"data=3\) cannot divide 4 process.*from \[1, 2, 4\]"):
            Mesh(group, 3)

    ranks(4)(work)
