"""A mesh by itself; `tests/multiprocess/test_split_layers.py` has one of several processes."""

import types

import pytest

from tfdist.runtime import groups, mesh
from tfdist.runtime.mesh import Mesh

GRID = Mesh(data=2, stage=3, model=2)


def test_neighbours_along_the_last_axis_have_consecutive_ranks():
    assert GRID.size == 12
    assert [GRID.place("model", rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [GRID.place("stage", rank) for rank in (0, 1, 2, 5, 6)] == [0, 0, 1, 2, 0]
    assert GRID.along("model", 7) == (6, 7)
    assert GRID.along("stage", 7) == (7, 9, 11)
    assert GRID.along("data", 7) == (1, 7)


def test_processes_across_an_axis_have_the_same_place():
    assert GRID.across("model", 3) == (1, 3, 5, 7, 9, 11)
    assert GRID.across("stage", 3) == (2, 3, 8, 9)
    assert Mesh(model=3).across("model", 1) == (1,)


def test_mesh_is_described_as_it_is_written():
    assert str(GRID) == "Mesh(data=2, stage=3, model=2)"


@pytest.mark.parametrize("length", [0, -1, 2.0, True, "2"])
def test_wrong_lengths_raise(length):
    with pytest.raises(ValueError, match=r"Mesh\(model=…\) must be an integer of at least 1; got"):
        Mesh(data=2, model=length)


def test_mesh_without_axes_raises():
    with pytest.raises(ValueError, match="at least one axis"):
        Mesh()


def test_other_axes_and_sizes_raise():
    with pytest.raises(ValueError, match=r"Mesh\(data=2, stage=3, model=2\) has no axis 'tensor'; it has 'data', 's"):
        GRID.along("tensor", 0)
    with pytest.raises(ValueError, match=r"is for 12 processes \(data=2 × stage=3 × model=2\), and 8 train together"):
        GRID.check_size(8)


def test_group_of_an_axis(monkeypatch):
    world = types.SimpleNamespace(current=lambda: types.SimpleNamespace(rank=5, size=12))
    for module in (groups, mesh):
        monkeypatch.setattr(module, "world", world)
    group = GRID.group("stage")
    assert (group.ranks, group.rank) == ((1, 3, 5), 2)
