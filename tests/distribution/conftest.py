import keras
import pytest
import tensorflow as tf

import tests.devices  # noqa: F401
from tfdist import initialization


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Each test joins anew; whatever distribution it sets is left."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(initialization, "_initialized", None)
    yield
    keras.distribution.set_distribution(None)
    tf.distribute.experimental_set_strategy(None)


@pytest.fixture
def processes(monkeypatch):
    """Pretends that this is rank 1 of so many processes."""

    def pretend(size):
        monkeypatch.setattr("tfdist.distribution.devices.count", lambda: size)
        monkeypatch.setattr("tfdist.distribution.devices.process", lambda: min(1, size - 1))

    return pretend
