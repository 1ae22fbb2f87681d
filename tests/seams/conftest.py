"""A model of plain Keras, and hooks for it."""

import keras
import pytest

from tfdist.seams import trainer


@pytest.fixture
def provided(monkeypatch):
    """Provides hooks, in the place of another feature, until the end of the test."""
    for name in ("provided", "kinds"):
        monkeypatch.setattr(trainer.points, name, [])

    def provide(kind, module="tfdist.strategies.keras.keras_steps", is_for=lambda model: True):
        kind.__module__ = module
        trainer.points.provide([kind], lambda model: [kind()] if is_for(model) else [])

    return provide


@pytest.fixture
def model():
    made = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile("sgd", "mse", run_eagerly=True)
    return made
