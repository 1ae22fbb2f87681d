"""What is put in place, and where Keras brings its own."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.distribution import devices, enabling
from tfdist.private.keras import tf_distribution

BROUGHT = ["initialize", "get_device_count", "num_processes", "process_id", "distribute_tensor"]


def test_what_the_backend_lacks_is_brought():
    tfdist.enable_keras_distribution()
    tfdist.enable_keras_distribution()
    keras.distribution.initialize()
    own = keras.distribution.list_devices()
    assert own == devices.names()
    assert keras.distribution.get_device_count() == keras.distribution.DataParallel().device_mesh.shape[0] == len(own)
    layout = keras.distribution.TensorLayout((None,), keras.distribution.DeviceMesh((len(own),), ["batch"]))
    given = np.ones(3), np.ones(2)
    assert keras.distribution.distribute_tensor(given, layout) is given


@pytest.fixture
def of_keras(monkeypatch):
    """As if Keras brought its own."""
    for name in BROUGHT:
        monkeypatch.setattr(tf_distribution, name, f"Keras's {name}", raising=False)
    monkeypatch.setattr(enabling._bring, "is_done", False)


@pytest.mark.usefixtures("of_keras")
def test_keras_own_is_left_alone():
    tfdist.enable_keras_distribution()
    assert [getattr(tf_distribution, name) for name in BROUGHT] == [f"Keras's {name}" for name in BROUGHT]
    assert not enabling._bring.is_done


def test_keras_3_10_has_no_count_of_devices(monkeypatch):
    monkeypatch.delattr(keras.distribution, "get_device_count", raising=False)
    monkeypatch.setattr(enabling._bring, "is_done", True)
    enabling._bring.__wrapped__()
    assert keras.distribution.get_device_count is devices.number_of
