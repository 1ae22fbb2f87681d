"""Measuring leaves the model as it is, whatever its calls take."""

import keras
import numpy as np
import pytest

from tests.model_parallel.test_device_scope import cnn, transformer, two_sequences
from tests.sweeps import some
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.model_parallel.stage_times import seconds_of

MODELS = {
    "cnn": lambda: cnn("CPU:0", "CPU:0"),
    "transformer": lambda: transformer("CPU:0", "CPU:0"),
    "shared": lambda: two_sequences(keras.layers.LSTM(4), "CPU:0", "CPU:0"),
}


@pytest.mark.parametrize("name", some(MODELS, 3, first=2))
def test_measuring_a_stage_leaves_weights_unchanged(name):
    model = MODELS[name]()
    calls, before = ModelCalls(model), model.get_weights()
    half = len(calls.calls) // 2
    assert seconds_of(calls, 0, half, 4) > 0
    assert seconds_of(calls, half, len(calls.calls), 4) > 0
    for weight, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_moving_statistics_and_random_states_are_as_before():
    inputs = keras.Input((4,))
    outputs = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(inputs))
    model = keras.Model(inputs, outputs)
    before = [variable.numpy() for variable in model.variables]
    seconds_of(ModelCalls(model), 0, 2, 8)
    for state, other in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(state.numpy(), other)
