"""Batches that are divided over devices, with one set of weights."""

import itertools

import keras
import numpy as np
import pytest

from tests.model_parallel.executed import executed, homes, places, train_step
from tests.model_parallel.test_device_scope import Subclassed
from tests.sweeps import some
from tfdist.model_parallel.device_scope import device_scope
from tfdist.model_parallel.replicate import replicate


def perceptron():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])


@pytest.mark.parametrize(("optimizer", "relocated"), some(itertools.product(["adam", "sgd"], [True, False]), 3))
def test_replicas_learn_what_the_model_does(optimizer, relocated):
    model, alone = perceptron(), perceptron()
    replicas = replicate(model, ["CPU:1", "CPU:2"], cpu_relocation=relocated)
    for one in (replicas, alone):
        one.compile(optimizer, "mse")
    steps = train_step(replicas, 8), train_step(alone, 8)
    found = executed(steps[0])
    assert [one for one in found if one.is_elsewhere] == []
    assert places(found, "MatMul") == {"CPU:1": 5, "CPU:2": 5}
    assert set(places(found, "AssignSub")) == {"CPU:0"}
    assert set(homes(replicas.variables)) == {"CPU:0"}
    assert set(homes(replicas.optimizer.variables)) == {"CPU:0"}
    steps[1]()
    for _ in range(19):
        for step in steps:
            step()
    for one, other in zip(replicas.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    is_same = all((one == other).all() for one, other in zip(model.get_weights(), replicas.get_weights(), strict=True))
    assert is_same == (not relocated), "the weights are the model's own, or a copy's"


@pytest.mark.parametrize("rows", [2, 5, 7, 64])
def test_any_number_of_rows_in_their_order(rows):
    model = perceptron()
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype("float32")
    replicas = replicate(model, ["CPU:0", "CPU:1"])
    np.testing.assert_allclose(replicas.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_structures_of_inputs_and_outputs():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((3,), name="b")}
    both = keras.layers.Add()([inputs["a"], inputs["b"]])
    model = keras.Model(inputs, {"sum": both, "twice": keras.layers.Rescaling(2.0)(both)})
    replicas = replicate(model, ["CPU:1", "CPU:2"], cpu_merge=False)
    x = {"a": np.ones((5, 3), "float32"), "b": np.arange(15, dtype="float32").reshape(5, 3)}
    found = replicas.predict(x, verbose=0)
    np.testing.assert_array_equal(found["sum"], x["a"] + x["b"])
    np.testing.assert_array_equal(found["twice"], 2 * (x["a"] + x["b"]))


def test_replicas_are_saved(tmp_path):
    replicas = replicate(perceptron(), ["CPU:1", "CPU:2"])
    replicas.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.compile("sgd", "mse")
    assert places(executed(train_step(loaded, 8)), "MatMul") == {"CPU:1": 5, "CPU:2": 5}


def test_bad_input():
    with pytest.raises(ValueError, match=r"tfdist.replicate expects a list of devices"):
        replicate(perceptron(), [])
    with pytest.raises(ValueError, match="expected a device of this process; got 'GPU:9'"):
        replicate(perceptron(), ["GPU:9"])
    with pytest.raises(ValueError, match="Write it with the functional API"):
        replicate(Subclassed(), ["CPU:0"])


@pytest.mark.parametrize("relocated", [False, True])
def test_a_model_that_was_made_in_a_scope(relocated):
    """As `multi_gpu_model` wanted it: the template on the CPU, the replicas elsewhere."""
    with device_scope("CPU:0"):
        model = perceptron()
    alone = perceptron()
    replicas = replicate(model, ["CPU:1", "CPU:2"], cpu_relocation=relocated)
    for one in (replicas, alone):
        one.compile("sgd", "mse")
    found = executed(train_step(replicas, 8))
    assert places(found, "MatMul") == {"CPU:1": 5, "CPU:2": 5}
    assert set(homes(replicas.variables)) == {"CPU:0"}
    train_step(alone, 8)()
    for one, other in zip(replicas.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_weights_leave_the_device_of_their_scope():
    with device_scope("CPU:2"):
        model = perceptron()
    assert set(homes(replicate(model, ["CPU:1"], cpu_relocation=True).variables)) == {"CPU:0"}


def test_models_inside_whose_layers_have_the_same_names():
    def head():
        with device_scope("CPU:2"):
            return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="head")])

    inputs = keras.Input((8,))
    with pytest.raises(ValueError, match="several of its layers are named head: make the model without scopes"):
        replicate(keras.Model(inputs, head()(head()(inputs))), ["CPU:1"])
