"""Stages: what goes between them, and who has which variable."""

import keras
import pytest
from keras import layers

from tests.pipeline.models import in_stages, shared, words
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline.stages import Stages


def named(stages, stage):
    return [call.name for call in stages.calls_of(stage)]


def test_skip_connections_are_sent_directly_to_consuming_stage():
    inputs = keras.Input((4,))
    first = layers.Dense(4, name="first")(inputs)
    second = layers.Dense(4, name="second")(first)
    third = layers.Add(name="third")([layers.Dense(4, name="before")(second), first])
    stages = Stages(ModelCalls(keras.Model(inputs, third)), [1, 2, 4])
    assert [named(stages, stage) for stage in range(3)] == [["first"], ["second"], ["before", "third"]]
    assert stages.edges == ((0, 1), (0, 2), (1, 2))
    assert stages.sent((0, 1)) == stages.sent((0, 2))
    assert [len(stages.inputs(stage)) for stage in range(3)] == [1, 0, 0]


def test_outputs_of_early_stages_go_to_the_last_one():
    inputs = keras.Input((4,))
    early = layers.Dense(4)(inputs)
    calls = ModelCalls(keras.Model(inputs, [early, layers.Dense(4)(layers.Dense(4)(early))]))
    stages = in_stages(calls, 3)
    assert stages.edges == ((0, 1), (0, 2), (1, 2))
    assert stages.sent((0, 2)) == calls.outputs[:1]


def test_masks_are_sent_and_have_no_gradient():
    calls = ModelCalls(words())
    first = 1 + next(place for place, call in enumerate(calls.calls) if call.operation.name.startswith("embedding"))
    stages = Stages(calls, [first, len(calls.calls)])
    (edge,) = stages.edges
    embedded = [key for key in stages.sent(edge) if calls.tensors[key].dtype == "float32"]
    assert len(embedded) == 1
    assert stages.has_mask(embedded[0])
    assert [(spec.dtype.name, spec.shape[0]) for spec in stages.specs(embedded)] == [("float32", None), ("bool", None)]
    assert stages.differentiable(edge) == tuple(embedded)


def test_homes_of_shared_variables_are_all_calling_stages():
    model = shared()
    stages = in_stages(ModelCalls(model), 3)
    homes = [stages.homes[id(variable)] for variable in model.variables]
    assert (0, 1, 2) in homes
    for stage in range(3):
        weight_ids = {id(weight) for layer in stages.layers(stage) for weight in layer.variables}
        assert weight_ids == {id(weight) for weight, home in zip(model.variables, homes, strict=True) if stage in home}


@pytest.mark.parametrize("ends", [[], [1], [2, 1, 3], [0, 3], [1, 1, 3], [1, 4]])
def test_invalid_stage_ends_raise(ends):
    model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4) for _ in range(3))])
    with pytest.raises(ValueError, match=r"ends of stages must rise to the number of the model's calls, 3; got \["):
        Stages(ModelCalls(model), ends)
