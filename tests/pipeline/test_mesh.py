"""Ranks in a mesh of pipelines."""

import pytest

from tfdist.pipeline.mesh import PipelineMesh, side_by_side
from tfdist.runtime.mesh import Mesh


def test_ranks_map_to_workers_and_replicas(ranks):
    def work(group):
        mesh = PipelineMesh(group, side_by_side(6, 2))
        return mesh.worker, mesh.replica, mesh.pipeline.members, mesh.replicas.members, mesh.rank(2, 1)

    results = ranks(6)(work)
    assert [result[:2] for result in results] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [result[2] for result in results[:2]] == [(0, 2, 4), (1, 3, 5)]
    assert [result[3] for result in results[::2]] == [(0, 1), (2, 3), (4, 5)]
    assert all(result[4] == 5 for result in results)


def test_pipelines_are_along_one_axis_of_any_mesh(ranks):
    """Ranks 0 and 2 of eight are a pipeline, and ranks 0, 1, 4 and 5 have the same stage."""

    def work(group):
        mesh = PipelineMesh(group, Mesh(data=2, stage=2, model=2))
        return mesh.worker, mesh.replica, mesh.pipeline.members, mesh.replicas.members, mesh.ranks(1), mesh.data

    results = ranks(8)(work)
    assert [result[:2] for result in results] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert [result[2] for result in results[:2]] == [(0, 2), (1, 3)]
    assert results[0][3:] == ((0, 1, 4, 5), (2, 3, 6, 7), 4)


def test_without_stages_each_process_is_a_pipeline(ranks):
    def work(group):
        mesh = PipelineMesh(group, Mesh(model=2))
        return mesh.worker, mesh.replica, mesh.workers, mesh.data, mesh.ranks(0), mesh.ranks(3)

    assert ranks(2)(work) == [(0, rank, 1, 2, (0, 1), (0, 1)) for rank in range(2)]


def test_data_that_does_not_divide_processes_raises():
    with pytest.raises(ValueError, match=r"data=3\) cannot divide 4 process.*from \[1, 2, 4\]"):
        side_by_side(4, 3)
