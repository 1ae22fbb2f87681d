"""Models and optimizers made outside the scope. Parameter servers are threads of this process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.strategies.served import served

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X[:, :1]


def model(*layers):
    return keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(1)])


def optimizer(strategy):
    made = keras.optimizers.Adam()
    with strategy.scope():
        model().compile(made, "mse")


def built_optimizer(strategy):
    made = keras.optimizers.Adam()
    made.build(model().trainable_variables)
    with strategy.scope():
        model().compile(made, "mse")


def inner_optimizer(strategy):
    made = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    with strategy.scope():
        model().compile(made, "mse")


def compile_outside(strategy):
    with strategy.scope():
        network = model()
    network.compile(keras.optimizers.Adam(), "mse")


def own_loop(strategy):
    made = keras.optimizers.Adam()
    with strategy.scope():
        network = model()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(network(X) ** 2)
        made.apply(tape.gradient(loss, network.trainable_variables), network.trainable_variables)


def whole_model(strategy):
    network = model()
    with strategy.scope():
        network.compile("adam", "mse")


def model_and_compile(strategy):
    network = model()
    network.compile("adam", "mse")
    with strategy.scope():
        network.fit(X, Y, verbose=0)


def layer(strategy):
    dense = keras.layers.Dense(3)
    dense.build((None, 4))
    with strategy.scope():
        model(dense).compile("adam", "mse")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (optimizer, "the optimizer adam"),
        (built_optimizer, "the optimizer adam"),
        (inner_optimizer, "the optimizer loss_scale_optimizer"),
        (compile_outside, "the optimizer adam"),
        (own_loop, "the optimizer adam"),
        (whole_model, "the model sequential"),
        (model_and_compile, "the model sequential"),
        (layer, "the variable dense"),
    ],
)
def test_objects_created_outside_scope_raise(wrong, what):
    with served(servers=1) as (strategy,):
        with pytest.raises(ValueError, match=rf"created outside of strategy.scope\(\): {what}") as told:
            wrong(strategy)
        assert "inside `with strategy.scope():`" in str(told.value)


def test_optimizer_replaced_outside_scope_raises():
    with served(servers=1) as (strategy,):
        with strategy.scope():
            network = model()
            network.compile("adam", "mse")
        network.optimizer = keras.optimizers.Adam()
        with pytest.raises(ValueError, match="the optimizer adam"):
            network.fit(X, Y, verbose=0)


def test_frozen_layers_may_come_from_outside():
    """No server updates them."""
    base = keras.layers.Dense(3, trainable=False)
    base.build((None, 4))
    with served(servers=1) as (strategy,):
        with strategy.scope():
            network = model(base)
            network.compile("sgd", "mse")
        network.fit(X, Y, verbose=0)
        assert len(strategy.extended.links(network)) == 1


def test_models_without_the_strategy_are_left_alone():
    with served(servers=1) as (strategy,):
        network = model()
        network.compile(keras.optimizers.Adam(), "mse")
        network.fit(X, Y, verbose=0)
        assert strategy.extended.links(network) == []


@pytest.mark.parametrize("make", [tfdist.AllReduceStrategy, lambda: tfdist.PipelineStrategy(stages=2, micro_batches=2)])
def test_model_outside_scope_raises_without_servers(make):
    strategy = make()
    with pytest.raises(ValueError, match=r"created outside of strategy.scope\(\): the model sequential"):
        whole_model(strategy)
