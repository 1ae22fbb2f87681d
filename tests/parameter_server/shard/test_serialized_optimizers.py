import json

import keras
import numpy as np
import pytest

from tests.parameter_server.shard.test_store import store_of
from tfdist.parameter_server.shard.serialized_optimizers import deserialized


def scheduled():
    return keras.optimizers.Adam(name="adam", learning_rate=keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))


@pytest.mark.parametrize("make", [scheduled, lambda: keras.optimizers.LossScaleOptimizer(scheduled())])
def test_the_serialized_form_stays_as_it_is(make):
    config = keras.saving.serialize_keras_object(make())
    before = json.dumps(config)
    optimizer = deserialized(config)
    assert json.dumps(config) == before
    assert keras.saving.serialize_keras_object(optimizer) == config


def test_a_store_keeps_what_a_snapshot_can_hold():
    store = store_of(scheduled())
    assert float(np.asarray(deserialized(store.config).learning_rate)) == pytest.approx(0.1)
    assert json.loads(json.dumps(store.config)) == keras.saving.serialize_keras_object(scheduled())


def test_what_is_no_optimizer_raises():
    config = keras.saving.serialize_keras_object(keras.losses.MeanSquaredError())
    with pytest.raises(ValueError, match="Keras cannot make the optimizer MeanSquaredError from its description"):
        deserialized(config)
