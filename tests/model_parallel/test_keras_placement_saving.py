"""Devices in saved models, which plain Keras loads, too."""

import json
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest

from tests.model_parallel.executed import executed, homes, places, train_step
from tests.model_parallel.test_device_scope import MODELS, functional, sequential, two_sequences
from tests.multiprocess import harness
from tests.sweeps import some, sweep
from tfdist.model_parallel import keras_placement_saving
from tfdist.model_parallel.device_scope import device_scope


@pytest.mark.parametrize("kind", some(["functional", "sequential", "built_late", "nested"], first=1))
def test_a_loaded_model_computes_where_the_saved_one_did(kind, tmp_path):
    model = MODELS[kind]()
    model.compile("adam", "mse")
    step = train_step(model, 8)
    step()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    operations = executed(train_step(loaded, 8))
    assert places(operations, "MatMul") == {"CPU:1": 2, "CPU:2": 3}
    assert [operation for operation in operations if operation.is_elsewhere] == []
    assert homes(loaded.trainable_variables) == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]
    assert homes(loaded.optimizer.variables[2:]) == ["CPU:1"] * 4 + ["CPU:2"] * 4
    step()
    for weight, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


def test_loaded_shared_layer_runs_on_both_devices(tmp_path):
    model = two_sequences(keras.layers.Bidirectional(keras.layers.LSTM(3)))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.compile("sgd", "mse")
    operations = executed(train_step(loaded, 5, 4, inputs=2))
    assert [operation for operation in operations if operation.is_elsewhere] == []
    counts = places(operations, "MatMul")
    assert counts["CPU:1"] == counts["CPU:2"] > 2
    assert set(homes(loaded.layers[2].trainable_variables)) == {"CPU:1"}


def test_loaded_variables_keep_device_of_build_not_of_call(tmp_path):
    with device_scope("CPU:1"):
        layer = keras.layers.Dense(2)
        layer.build((None, 8))
    inputs = keras.Input((8,))
    with device_scope("CPU:2"):
        model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert homes(loaded.variables) == ["CPU:1"] * 2
    assert places(executed(lambda: loaded.predict_on_batch(np.ones((2, 8), "float32"))), "MatMul") == {"CPU:2": 1}


def test_from_config_and_json():
    for make in (functional, sequential):
        model = keras.models.model_from_json(make().to_json())
        assert homes(model.variables) == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]


def test_models_without_devices_are_saved_as_ever():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assert "tfdist" not in model.to_json()
    inputs = keras.Input((3,))
    assert "tfdist" not in keras.Model(inputs, model(inputs)).to_json()


def test_a_device_that_is_missing_is_left_out(tmp_path, caplog):
    keras_placement_saving._missing.clear()
    sequential().save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        parts = {name: file.read(name) for name in file.namelist()}
    parts["config.json"] = parts["config.json"].replace(b"CPU:1", b"GPU:5")
    with zipfile.ZipFile(tmp_path / "other.keras", "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)
    loaded = keras.saving.load_model(tmp_path / "other.keras")
    assert homes(loaded.variables) == ["CPU:0", "CPU:0", "CPU:2", "CPU:2"]
    assert caplog.text.count("is missing, and Keras places its layers: expected a device of this process; got") == 1


PLAIN = """
import keras, numpy as np, sys
model = keras.saving.load_model(sys.argv[1])
print(model.predict(np.ones((1, 8), "float32"), verbose=0).tolist())
assert not any("tfdist" in name for name in sys.modules)
"""


@pytest.mark.parametrize("make", [functional, sweep(sequential)])
def test_plain_keras_loads_placed_models(make, tmp_path):
    model = make()
    model.save(tmp_path / "model.keras")
    expected = model.predict(np.ones((1, 8), "float32"), verbose=0)
    completed = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path / "model.keras")],
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert completed.returncode == 0, completed.stderr
    np.testing.assert_allclose(json.loads(completed.stdout.splitlines()[-1]), expected, rtol=1e-6)


@keras.saving.register_keras_serializable("tests")
class Block(keras.layers.Layer):
    """Layers inside get their names from a counter, another one when the model is loaded."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.inner = [keras.layers.Dense(units) for _ in range(2)]

    def build(self, input_shape):
        for layer in self.inner:
            layer.build(input_shape)
            input_shape = (*input_shape[:-1], self.units)

    def call(self, inputs):
        return self.inner[1](self.inner[0](inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def test_renamed_inner_layers_keep_devices_when_loaded(tmp_path):
    inputs = keras.Input((8,))
    with device_scope("CPU:1"):
        hidden = Block(4)(inputs)
    with device_scope("CPU:2"):
        model = keras.Model(inputs, Block(4)(hidden))
    model.save(tmp_path / "model.keras")
    keras.layers.Dense(1)  # takes a name
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert homes(loaded.variables) == homes(model.variables) == ["CPU:1"] * 4 + ["CPU:2"] * 4
