"""Ranks in a mesh."""

import pytest

from tfdist.pipeline.mesh import Mesh


def test_ranks_map_to_workers_and_replicas(ranks):
    def work(group):
        mesh = Mesh(group, 2)
        return mesh.worker, mesh.replica, mesh.pipeline.members, mesh.replicas.members, mesh.rank(2, 1)

    results = ranks(6)(work)
    assert [result[:2] for result in results] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [result[2] for result in results[:2]] == [(0, 2, 4), (1, 3, 5)]
    assert [result[3] for result in results[::2]] == [(0, 1), (2, 3), (4, 5)]
    assert all(result[4] == 5 for result in results)


def test_data_that_does_not_divide_processes_raises(ranks):
    def work(group):
        with pytest.raises(ValueError, match=r"data=3\) cannot divide 4 process.*from \[1, 2, 4\]"):
            Mesh(group, 3)

    ranks(4)(work)
