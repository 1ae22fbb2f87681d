"""Devices of calls and variables, in whatever Keras makes of a model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.model_parallel.executed import executed, homes, places, train_step
from tests.model_parallel.test_device_scope import functional, nested, sequential
from tfdist.model_parallel.device_scope import device_scope
from tfdist.model_parallel.keras_placement import device_of, is_placed, nodes_of


def devices(model):
    return [device_of(node) for node in nodes_of(model)]


def test_calls_know_their_devices():
    assert devices(functional()) == ["/device:CPU:1", "/device:CPU:2"]
    inputs = keras.Input((3,))
    assert devices(keras.Model(inputs, keras.layers.Dense(1)(inputs))) == [None]


def test_is_placed_detects_devices_in_nested_models():
    inputs = keras.Input((8,))
    around = keras.Model(inputs, keras.layers.Dense(1)(functional()(inputs)))
    assert all(map(is_placed, (functional(), sequential(), nested(), around)))
    assert not is_placed(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))


def test_devices_follow_added_and_removed_layers():
    model = sequential()
    assert devices(model._functional) == ["/device:CPU:1", "/device:CPU:2"]
    model.pop()
    model.add(keras.layers.Dense(3))
    assert devices(model._functional) == ["/device:CPU:1", None]


def test_layer_with_reused_id_has_no_device():
    model = keras.Sequential([keras.Input((4,))])
    layer = keras.layers.Dense(2)
    model.__dict__["_tfdist_devices"] = {id(layer): "/device:CPU:1"}  # as of one that was removed
    model.add(layer)
    assert devices(model._functional) == [None]


def test_adding_a_non_layer_raises_error_of_keras():
    with pytest.raises(ValueError, match="Only instances of"):
        sequential().add(7)


def test_sequential_made_in_scope_is_on_its_device():
    with device_scope("CPU:2"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    assert devices(model._functional) == ["/device:CPU:2"] * 2
    assert homes(model.variables) == ["CPU:2"] * 4


def test_models_made_of_placed_tensors_keep_devices():
    model = functional()
    hidden = model.layers[1].output
    part = keras.Model(model.inputs, hidden)
    assert devices(part) == ["/device:CPU:1"]
    rest = keras.Model(hidden, model.outputs)
    assert devices(rest) == ["/device:CPU:2"], "whose calls Keras copies"


def test_cloned_models_keep_devices():
    for make in (functional, sequential, nested):
        clone = keras.models.clone_model(make())
        clone.compile("sgd", "mse")
        operations = executed(train_step(clone, 8))
        assert places(operations, "MatMul") == {"CPU:1": 2, "CPU:2": 3}, make
        assert homes(clone.trainable_variables) == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"], make


def test_each_call_of_shared_layer_has_its_own_device():
    layer, inputs = keras.layers.Dense(4), keras.Input((4,))
    with device_scope("CPU:2"):
        late = keras.layers.Dense(4)
    with device_scope("CPU:1"):
        hidden = layer(inputs)
    hidden = late(hidden)
    with device_scope("CPU:2"):
        outputs = layer(hidden)
    model = keras.Model(inputs, outputs)
    assert devices(model) == ["/device:CPU:1", None, "/device:CPU:2"]
    operations = executed(lambda: model.predict_on_batch(np.ones((2, 4), "float32")))
    assert places(operations, "MatMul") == {"CPU:0": 1, "CPU:1": 1, "CPU:2": 1}


def test_custom_training_loop_runs_on_scope_devices():
    model, optimizer = functional(), keras.optimizers.SGD(0.001)
    x = tf.ones((4, 8))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    operations = executed(step)
    assert places(operations, "MatMul") == {"CPU:1": 2, "CPU:2": 3}
    first = float(step())
    assert float(step()) < first


def test_unbuilt_sequential_runs_on_device_of_each_call():
    shared = keras.Sequential([keras.layers.Dense(4)])
    inputs = [keras.Input((8,)), keras.Input((8,))]
    outputs = []
    for device, tensor in zip(("CPU:1", "CPU:2"), inputs, strict=True):
        with device_scope(device):
            outputs.append(shared(tensor))
    model = keras.Model(inputs, keras.layers.Add()(outputs))
    operations = executed(lambda: model.predict([np.ones((4, 8))] * 2, verbose=0))
    assert places(operations, "MatMul") == {"CPU:1": 1, "CPU:2": 1}


def test_custom_jit_compiled_function_raises():
    with pytest.raises(ValueError, match=r"layers in a tfdist.device_scope, and XLA compiles for one device"):
        tf.function(functional(), jit_compile=True)(tf.ones([4, 8]))


def test_device_scope_with_several_replicas_per_process_raises():
    strategy = tfdist.AllReduceStrategy(devices=["CPU:1", "CPU:2"])
    with strategy.scope():
        dense, inputs = keras.layers.Dense(4), keras.Input((8,))
        dense(inputs)  # its variables are made outside of the scope
        with pytest.raises(ValueError, match="this strategy has 2 replicas in each process"), device_scope("CPU:0"):
            dense(inputs)


def test_optimizer_operations_run_on_device_of_variable():
    model = functional()
    model.compile(keras.optimizers.Adam(0.01, weight_decay=0.1, gradient_accumulation_steps=2), "mse")
    operations = executed(train_step(model, 8))
    assert set(places(operations, "AssignSub")) == {"CPU:1", "CPU:2"}
    assigned = places(operations, "AssignVariable")
    assert assigned["CPU:1"] == assigned["CPU:2"] >= 2, "the accumulators"
    assert assigned["CPU:0"] <= 4, "iterations and what metrics keep"
