"""The `extended` of a pipeline: models in stages, and what this process holds of them."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tfdist.strategies.divided.described_variables import is_described


def network():
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(3), layers.Dense(2)])


@pytest.fixture
def strategy():
    return tfdist.PipelineStrategy(stages=3, micro_batches=2, schedule="gpipe")


def test_a_model_is_divided_once_and_placed_as_it_grows(strategy):
    with strategy.scope():
        model = network()
        assert all(is_described(variable) for variable in model.variables)
        pipelined = strategy.extended.of_model(model)
        assert pipelined.stages.count == 3
        assert pipelined.table.workers == (0, 1, 2)
        assert not any(is_described(variable) for variable in model.variables)
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    assert strategy.extended.of_model(model) is pipelined
    strategy.extended.place(model)
    assert not any(is_described(variable) for variable in model.optimizer.variables)
    assert all(strategy.extended.holds(model, variable) for variable in model.variables)


def test_single_process_reads_values_and_is_writer(strategy):
    with strategy.scope():
        model = network()
        values = strategy.extended.values(model, model.variables[:1])
        np.testing.assert_array_equal(values[0], model.variables[0])
        assert strategy.extended.is_writer
        assert strategy.extended.run_on_writer(model, lambda: "written") == "written"


def test_strategy_does_not_keep_models_alive(strategy):
    with strategy.scope():
        model = network()
        model.compile("adam", "mse")
    model.fit(np.ones([4, 6]), np.ones([4, 2]), verbose=0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
