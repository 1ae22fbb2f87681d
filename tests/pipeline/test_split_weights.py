"""Which processes have which part of a weight; that models train so is in the tests over processes."""

import keras
import numpy as np
import pytest

from tfdist.pipeline.mesh import PipelineMesh
from tfdist.pipeline.split_weights import SplitWeights
from tfdist.runtime.mesh import Mesh
from tfdist.strategies.divided import split_axis
from tfdist.strategies.divided.split_axis import Split


def variables():
    """A weight that is split by columns, and one that is not."""
    split, whole = (keras.Variable(np.zeros((4, 6))) for _ in range(2))
    split_axis.ask_for(split, Split("model", 1, "ColumnParallelDense a", "units"))
    return split, whole


def test_parts_are_on_the_processes_of_the_stages_that_hold_a_weight(ranks):
    def work(group):
        weights = SplitWeights(None, PipelineMesh(group, Mesh(data=2, stage=2, model=2)), splits=True)
        split, whole = variables()
        assert weights.owner(whole, (1,)) is None
        assert weights.owner(split, (0, 1)).places == (0, 1) * 4
        owner = weights.owner(split, (1,))
        assert (owner.bounds, owner.axis) == ((0, 3, 6), 1)
        return owner.places

    assert ranks(8)(work) == [(None, None, 0, 1, None, None, 0, 1)] * 8


@pytest.mark.parametrize(("splits", "expected"), [(True, [2, 4, 4, 8]), (False, [1, 1, 2, 2])])
def test_copies_are_counted_among_those_that_update_a_model_together(ranks, splits, expected):
    """These are all processes if weights are split, else those of a pipeline."""

    def work(group):
        weights = SplitWeights(None, PipelineMesh(group, Mesh(data=2, stage=2, model=2)), splits)
        return [weights.copies(variable, workers) for workers in ((1,), (0, 1)) for variable in variables()]

    assert ranks(8)(work) == [expected] * 8


def test_a_pipeline_in_one_process_updates_a_weight_of_two_stages_once(ranks):
    def work(group):
        weights = SplitWeights(None, PipelineMesh(group, Mesh(data=2)), splits=False)
        return weights.copies(variables()[1], (0, 1))

    assert ranks(2)(work) == [1, 1]


def test_layers_are_split_over_axes_of_the_mesh_but_that_of_stages(ranks):
    def work(group):
        mesh = PipelineMesh(group, Mesh(stage=2, model=2))
        weights = SplitWeights(None, mesh, splits=True)
        assert weights.number_of_parts("model") == 2
        with pytest.raises(ValueError, match="over the axis 'stage', along which the stages of the model are"):
            weights.number_of_parts("stage")
        with pytest.raises(ValueError, match="has no axis 'rows'"):
            weights.number_of_parts("rows")
        with pytest.raises(ValueError, match="the strategy has no mesh: add PipelineStrategy"):
            SplitWeights(None, mesh, splits=False).number_of_parts("model")
        alone = SplitWeights(None, PipelineMesh(group, Mesh(stage=4)), splits=False)
        return alone.number_of_parts("model")

    assert ranks(4)(work) == [1] * 4
