"""Models in stages: which calls are where, what they cost, and that they learn what the whole one does."""

import keras
import numpy as np
import pytest

import tfdist
from tests.model_parallel.executed import executed, homes, places, train_step
from tests.model_parallel.test_device_scope import Subclassed, cnn, functional, transformer, two_sequences
from tests.sweeps import some
from tfdist.model_parallel.keras_placement import device_of, nodes_of
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.model_parallel.partition import partition

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
BALANCES = ["time", "memory", "flops"]


def perceptron():
    layers = [keras.layers.Dense(16, "relu", name=f"dense{number}") for number in range(5)]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1, name="last")])


def several():
    """Two inputs, two outputs, a layer that is shared, and a model inside."""
    inputs = [keras.Input((8,), name="a"), keras.Input((8,), name="b")]
    shared = keras.layers.Dense(16, "tanh", name="shared")
    inner = keras.Sequential(
        [keras.Input((16,)), keras.layers.Dense(16), keras.layers.BatchNormalization()], name="inner"
    )
    joined = keras.layers.Add(name="joined")([shared(inputs[0]), inner(shared(inputs[1]))])
    return keras.Model(inputs, [keras.layers.Dense(1, name="one")(joined), keras.layers.Dense(1, name="two")(joined)])


MODELS = {
    "perceptron": (perceptron, [(8,)], 1),
    "cnn": (lambda: cnn("CPU:0", "CPU:0"), [(8, 8, 1)], 1),
    "transformer": (lambda: transformer("CPU:0", "CPU:0"), [(6,)], 1),
    "shared": (lambda: two_sequences(keras.layers.LSTM(4), "CPU:0", "CPU:0"), [(5, 4), (5, 4)], 1),
    "several": (several, [(8,), (8,)], 2),
}


def step_of(model, shapes, outputs):
    generator = np.random.default_rng(0)
    x = [generator.normal(size=(16, *shape)).astype("float32") for shape in shapes]
    y = [generator.normal(size=(16, 1)).astype("float32") for _ in range(outputs)]
    return lambda: model.train_on_batch(x if len(x) > 1 else x[0], y if outputs > 1 else y[0])


CASES = [*((name, "time") for name in MODELS), ("perceptron", "memory"), ("several", "flops")]


@pytest.mark.parametrize(("name", "balance"), some(CASES, 4, first=2))
def test_stages_compute_on_their_devices_and_learn_the_same(name, balance):
    make, shapes, outputs = MODELS[name]
    keras.utils.set_random_seed(0)
    model = make()
    partitioned = partition(model, DEVICES, balance=balance, batch_size=16, verbose=False)
    assert [stage.device for stage in partitioned.stages] == [f"/device:{device}" for device in DEVICES]
    calls = [call for stage in partitioned.stages for call in stage.calls]
    assert calls == [call.name for call in ModelCalls(model).calls]
    assert len(calls) == len(set(calls))
    assert partitioned.model is not model
    for weight, other in zip(partitioned.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
    loss = "mse" if outputs == 1 else ["mse", "mse"]
    for each_model in (partitioned.model, model):  # the whole one is eager, as it would trace longer than it trains
        each_model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=each_model is model)
    steps = [step_of(each_model, shapes, outputs) for each_model in (partitioned.model, model)]
    operations = executed(steps[0])
    assert [operation for operation in operations if operation.is_elsewhere] == []
    computing = {
        operation.device
        for operation in operations
        if operation.kind in ("Add", "AddV2", "BiasAdd", "Mul", "Sum", "Mean", "Sub")
    }
    assert computing == set(DEVICES)
    steps[1]()
    for _ in range(9):
        for step in steps:
            step()
    for weight, other in zip(partitioned.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-5)


def test_costs_of_stages():
    partitioned = partition(perceptron(), stages=3, balance="flops", batch_size=2, verbose=False)
    first, middle, last = partitioned.stages
    assert (first.calls, middle.calls, last.calls) == (
        ("dense0", "dense1"),
        ("dense2", "dense3"),
        ("dense4", "last"),
    )
    assert middle.cost == middle.flops == 2 * 2 * (2 * 16 * 16 + 16 + 16)
    assert middle.parameters == 2 * (16 * 16 + 16)
    assert middle.activations == 2 * 2 * 16 * 4
    assert middle.sent == 2 * 16 * 4, "what the next one takes"
    memory = partition(perceptron(), stages=3, balance="memory", batch_size=2, verbose=False)
    for stage in memory.stages:
        assert stage.cost == 16 * stage.parameters + stage.activations


def test_skip_connection_is_sent_across_both_cuts():
    inputs = keras.Input((8,))
    first = keras.layers.Dense(8, name="first")(inputs)
    second = keras.layers.Dense(8, name="second")(first)
    outputs = keras.layers.Add(name="sum")([first, second])
    partitioned = partition(keras.Model(inputs, outputs), stages=3, balance="flops", batch_size=1, verbose=False)
    assert [stage.calls for stage in partitioned.stages] == [("first",), ("second",), ("sum",)]
    assert [stage.sent for stage in partitioned.stages] == [32, 64, 0]


def test_stages_without_devices_leave_the_model_alone():
    model = perceptron()
    partitioned = partition(model, stages=2, balance="flops", verbose=False)
    assert partitioned.model is model
    assert {device_of(node) for node in nodes_of(model._functional)} == {None}
    assert {stage.device for stage in partitioned.stages} == {None}


def test_variables_live_where_their_layer_is_called_first():
    partitioned = partition(perceptron(), ["CPU:1", "CPU:2"], balance="flops", verbose=False)
    assert homes(partitioned.model.variables) == ["CPU:1"] * 6 + ["CPU:2"] * 6


def test_cut_inside_nested_model_places_its_layers():
    inner = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(3))], name="inner")
    model = keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(8)])
    partitioned = partition(model, ["CPU:1", "CPU:2"], balance="flops", verbose=False)
    assert [len(stage.calls) for stage in partitioned.stages] == [2, 2]
    assert homes(partitioned.model.variables) == ["CPU:1"] * 4 + ["CPU:2"] * 4
    assert homes(model.variables) == ["CPU:0"] * 8
    partitioned.model.compile("sgd", "mse")
    assert set(places(executed(train_step(partitioned.model, 8)), "MatMul")) == {"CPU:1", "CPU:2"}


def test_partition_replaces_devices_only_in_its_copy():
    model = functional()
    partitioned = partition(model, ["CPU:0", "CPU:2"], balance="flops", verbose=False)
    partitioned.model.compile("sgd", "mse")
    assert set(places(executed(train_step(partitioned.model, 8)), "MatMul")) == {"CPU:0", "CPU:2"}
    assert [device_of(node) for node in nodes_of(model)] == ["/device:CPU:1", "/device:CPU:2"], "it is as before"


def test_a_partition_is_saved(tmp_path):
    partitioned = partition(perceptron(), ["CPU:1", "CPU:2"], balance="flops", verbose=False)
    partitioned.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert homes(loaded.variables) == ["CPU:1"] * 6 + ["CPU:2"] * 6


@pytest.mark.parametrize("balance", BALANCES)
def test_partition_prints_stages_devices_and_costs(balance, capsys):
    partition(perceptron(), ["CPU:1", "CPU:2"], balance=balance)
    text = capsys.readouterr().out
    assert f"2 stages, balanced by {balance}" in text
    assert "0 CPU:1" in text
    assert "dense0 … dense" in text
    assert {"time": " ms", "memory": "kB", "flops": "k"}[balance] in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs either devices, one for each stage, or the number of stages"),
        ({"devices": ["CPU:0"], "stages": 1}, "needs either devices"),
        ({"devices": ["CPU:0", "GPU:3"]}, "expected a device of this process; got 'GPU:3'"),
        ({"stages": 7}, "expected 1 to 6 stages, at most one for each call of sequential.*; got 7"),
        ({"stages": 0}, "got 0"),
        ({"stages": 2, "balance": "speed"}, "got 'speed'"),
        ({"devices": 2}, "expects a list of devices, such as .'CPU:0', 'CPU:1', 'CPU:2'.; got 2"),
        ({"devices": "CPU:0"}, "expects a list of devices.*; got 'CPU:0'"),
        ({"devices": []}, "expects a list of devices.*; got ..$"),
        ({"stages": 2, "batch_size": 0}, "batch_size must be an integer of at least 1; got 0"),
    ],
)
def test_bad_input(given, message):
    with pytest.raises(ValueError, match=message):
        partition(perceptron(), **given)


def test_models_without_a_graph():
    with pytest.raises(ValueError, match="Write it with the functional API"):
        partition(Subclassed(), stages=2)


def test_partition_in_strategy_scope_uses_devices():
    with tfdist.AllReduceStrategy().scope():
        partitioned = partition(perceptron(), ["CPU:1", "CPU:2"], balance="time", verbose=False)
        partitioned.model.compile("sgd", "mse")
    assert set(places(executed(train_step(partitioned.model, 8)), "MatMul")) == {"CPU:1", "CPU:2"}


def test_layer_shared_with_nested_model_is_copied_once():
    dense, inner_inputs, inputs = keras.layers.Dense(8), keras.Input((8,)), keras.Input((8,))
    inner = keras.Model(inner_inputs, dense(keras.layers.Dense(8)(inner_inputs)))
    model = keras.Model(inputs, dense(inner(inputs)))
    partitioned = partition(model, ["CPU:1", "CPU:2"], balance="flops", verbose=False)
    assert partitioned.model.count_params() == model.count_params()
    assert model.losses == []


def test_variables_of_a_layer_that_two_stages_call_are_in_the_first():
    """Also those that it makes before it is called, such as the seed of Dropout."""
    inputs = keras.Input((8,))
    shared = keras.layers.Dropout(0.5, name="shared")
    model = keras.Model(inputs, shared(keras.layers.Dense(8, name="other")(shared(inputs))))
    partitioned = partition(model, ["CPU:1", "CPU:2"], balance="flops", verbose=False)
    assert [stage.calls for stage in partitioned.stages] == [("shared",), ("other", "shared (2)")]
    assert homes(partitioned.model.get_layer("shared").variables) == ["CPU:1"]
    assert homes(partitioned.model.get_layer("other").variables) == ["CPU:2"] * 2
