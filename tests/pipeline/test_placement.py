"""Which workers hold which variables."""

import collections

import keras
import pytest
from keras import layers

import tfdist
from tests.pipeline import models
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline.placement import Placement, lend, variables_of
from tfdist.pipeline.stages import Stages
from tfdist.strategies.divided import described_variables
from tfdist.strategies.divided.described_variables import is_described, is_elsewhere
from tfdist.strategies.divided.optimizer_slots import optimizer_variables

described_variables.install()


def described(make):
    with described_variables.describing():
        return make()


def network():
    return keras.Sequential([keras.Input((4,)), *(layers.Dense(4, name=f"d{place}") for place in range(4))])


@pytest.mark.parametrize("name", ["sgd", "adam", "adafactor", "lion", "muon", "ftrl"])
def test_optimizer_slots_are_on_workers_of_their_weights(name):
    def make():
        model = network()
        model.compile(name, "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    model = described(make)
    stages = Stages(ModelCalls(model), [2, 4])
    placement = Placement(stages, [0, 1], [1], None)
    placement.add_slots(model.optimizer)
    placement.place(variables_of(model))
    assert [is_elsewhere(variable) for variable in model.variables] == [True] * 4 + [False] * 4
    assert not any(is_described(variable) for variable in model.variables[4:])
    slots = optimizer_variables(model.optimizer)
    assert not any(is_described(variable) and not is_elsewhere(variable) for variable in slots)
    for slot in slots:
        place = next((place for place in range(4) if f"d{place}_" in slot.path), None)
        if place is not None:  # else it is none of a weight, as the number of iterations
            assert is_elsewhere(slot) == (place < 2), slot.path
            assert placement.workers(slot) == ((0,) if place < 2 else (1,))
    assert not is_described(model.optimizer.iterations)


def test_layers_that_several_stages_call_are_on_all_of_them():
    model = described(models.shared)
    calls = ModelCalls(model)
    stages = Stages(calls, range(1, len(calls.calls) + 1))
    placement = Placement(stages, range(stages.count), [0], None)
    times = collections.Counter(id(call.operation) for call in calls.calls)
    layer = next(call.operation for call in calls.calls if times[id(call.operation)] > 1)
    places = tuple(place for place, call in enumerate(calls.calls) if call.operation is layer)
    assert placement.workers(layer.kernel) == places
    assert placement.holds(layer.kernel) == (0 in places)


def test_variables_are_on_devices_of_their_workers():
    strategy = tfdist.PipelineStrategy(stages=2, micro_batches=1)
    with strategy.scope():
        model = network()
    devices = ["/device:CPU:1", "/device:CPU:2"]
    placement = Placement(Stages(ModelCalls(model), [1, 4]), [0, 1], [0, 1], devices)
    with strategy.scope():
        placement.place(model.variables)
    homes = [variable.value.device.rsplit("/", 1)[-1] for variable in model.variables]
    assert homes == ["device:CPU:1"] * 2 + ["device:CPU:2"] * 6


def test_a_worker_that_would_train_nothing_is_lent_a_weight():
    model = described(network)
    for layer in model.layers[:2]:
        layer.trainable = False
    stages = Stages(ModelCalls(model), [1, 2, 4])
    lend(stages, [0, 1, 2])
    placement = Placement(stages, [0, 1, 2], [1], None)
    held = [variable.path.partition("/")[2] for variable in model.trainable_variables if placement.holds(variable)]
    assert held == ["d2/bias"]
    assert placement.workers(model.get_layer("d2").bias) == (2, 0, 1), "the stage that calls it speaks for it"
    assert placement.workers(model.get_layer("d2").kernel) == (2,)


def test_layers_of_a_placed_model_stay_where_they_are():
    model = described(network)
    Placement(Stages(ModelCalls(model), [2, 4]), [0, 1], [0], None).place(variables_of(model))
    Placement(Stages(ModelCalls(model), [2, 4]), [0, 1], [0], None).place(variables_of(model))
    moved = Placement(Stages(ModelCalls(model), [1, 4]), [0, 1], [0], None)
    with pytest.raises(
        ValueError, match=r"d1/kernel is on worker 0 .* needs it on worker 1\. Make this model in the scope"
    ):
        moved.place(variables_of(model))


def test_a_process_with_all_workers_moves_layers_as_each_model_needs():
    model = described(network)
    for ends in ([2, 4], [1, 4]):
        placement = Placement(Stages(ModelCalls(model), ends), [0, 1], [0, 1], None)
        placement.place(variables_of(model))
    assert placement.workers(model.layers[1].kernel) == (1,)
