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
    return [device_of(one) for one in nodes_of(model)]


def test_calls_know_their_devices():
    assert devices(functional()) == ["/device:CPU:1", "/device:CPU:2"]
    inputs = keras.Input((3,))
    assert devices(keras.Model(inputs, keras.layers.Dense(1)(inputs))) == [None]


def test_which_models_are_placed():
    inputs = keras.Input((8,))
    around = keras.Model(inputs, keras.layers.Dense(1)(functional()(inputs)))
    assert all(map(is_placed, (functional(), sequential(), nested(), around)))
    assert not is_placed(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))


def test_a_sequential_is_made_anew_with_each_layer():
    model = sequential()
    assert devices(model._functional) == ["/device:CPU:1", "/device:CPU:2"]
    model.pop()
    model.add(keras.layers.Dense(3))
    assert devices(model._functional) == ["/device:CPU:1", None]


def test_a_layer_in_the_memory_of_a_removed_one_has_no_device():
    model = keras.Sequential([keras.Input((4,))])
    layer = keras.layers.Dense(2)
    model.__dict__["_tfdist_devices"] = {id(layer): "/device:CPU:1"}  # as of one that was removed
    model.add(layer)
    assert devices(model._functional) == [None]


def test_what_is_no_layer_is_an_error_of_keras():
    with pytest.raises(ValueError, match="Only instances of"):
        sequential().add(7)


def test_a_sequential_in_one_scope():
    with device_scope("CPU:2"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    assert devices(model._functional) == ["/device:CPU:2"] * 2
    assert homes(model.variables) == ["CPU:2"] * 4


def test_a_model_of_another_ones_tensors():
    model = functional()
    hidden = model.layers[1].output
    part = keras.Model(model.inputs, hidden)
    assert devices(part) == ["/device:CPU:1"]
    rest = keras.Model(hidden, model.outputs)
    assert devices(rest) == ["/device:CPU:2"], "whose calls Keras copies"


def test_clones():
    for make in (functional, sequential, nested):
        clone = keras.models.clone_model(make())
        clone.compile("sgd", "mse")
        found = executed(train_step(clone, 8))
        assert places(found, "MatMul") == {"CPU:1": 2, "CPU:2": 3}, make
        assert homes(clone.trainable_variables) == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"], make


def test_the_calls_of_a_shared_layer_in_the_order_of_the_graph():
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
    found = executed(lambda: model.predict_on_batch(np.ones((2, 4), "float32")))
    assert places(found, "MatMul") == {"CPU:0": 1, "CPU:1": 1, "CPU:2": 1}


def test_a_loop_of_ones_own():
    model, optimizer = functional(), keras.optimizers.SGD(0.001)
    x = tf.ones((4, 8))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    found = executed(step)
    assert places(found, "MatMul") == {"CPU:1": 2, "CPU:2": 3}
    first = float(step())
    assert float(step()) < first


def test_a_sequential_that_its_first_call_builds_is_where_it_is_called():
    shared = keras.Sequential([keras.layers.Dense(4)])
    inputs = [keras.Input((8,)), keras.Input((8,))]
    outputs = []
    for device, one in zip(("CPU:1", "CPU:2"), inputs, strict=True):
        with device_scope(device):
            outputs.append(shared(one))
    model = keras.Model(inputs, keras.layers.Add()(outputs))
    found = executed(lambda: model.predict([np.ones((4, 8))] * 2, verbose=0))
    assert places(found, "MatMul") == {"CPU:1": 1, "CPU:2": 1}


def test_xla_in_a_function_of_ones_own():
    with pytest.raises(ValueError, match=r"layers in a tfdist.device_scope, and XLA compiles for one device"):
        tf.function(functional(), jit_compile=True)(tf.ones([4, 8]))


def test_a_strategy_with_several_replicas_in_a_process():
    strategy = tfdist.AllReduceStrategy(devices=["CPU:1", "CPU:2"])
    with strategy.scope():
        dense, inputs = keras.layers.Dense(4), keras.Input((8,))
        dense(inputs)  # its variables are made outside of the scope
        with pytest.raises(ValueError, match="this strategy has 2 replicas in each process"), device_scope("CPU:0"):
            dense(inputs)


def test_all_that_an_optimizer_does_for_a_variable_is_beside_it():
    model = functional()
    model.compile(keras.optimizers.Adam(0.01, weight_decay=0.1, gradient_accumulation_steps=2), "mse")
    found = executed(train_step(model, 8))
    assert set(places(found, "AssignSub")) == {"CPU:1", "CPU:2"}
    assigned = places(found, "AssignVariable")
    assert assigned["CPU:1"] == assigned["CPU:2"] >= 2, "the accumulators"
    assert assigned["CPU:0"] <= 4, "iterations and what metrics keep"
