import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.keras.kept_state import model_with_state
from tests.strategies.ranked import Ranked, on_ranks
from tfdist.strategies.keras.keras_variables import average_state, broadcast_state, check_scope, state_of_layers


@pytest.fixture(scope="module")
def strategy(ranks):
    return Ranked(ranks(1).groups[0])


def test_state_is_neither_weights_nor_frozen_ones_nor_metrics_nor_seeds(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.Dense(2),
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    model.layers[0].trainable = False
    assert [variable.name for variable in state_of_layers(model)] == ["moving_mean", "moving_variance"]


def test_check_scope_raises_for_objects_made_outside(strategy):
    with strategy.scope():
        inside = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="head")])
        inside.compile("sgd", "mse")
    check_scope(inside)
    body = keras.Sequential([keras.layers.Input((2,)), *(keras.layers.Dense(2, name=f"body_{n}") for n in range(3))])
    with strategy.scope():
        mixed = keras.Sequential([body, inside])
    with pytest.raises(
        ValueError, match=r"outside of strategy.scope\(\): .*body_0/kernel, .*body_0/bias, .*, …\. Create the"
    ):
        check_scope(mixed)
    optimizer = keras.optimizers.SGD(name="mine")
    inside.optimizer = optimizer
    with pytest.raises(ValueError, match="the optimizer mine"):
        check_scope(inside)


def test_broadcast_state_sends_weights_and_optimizer_of_chief(ranks):
    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
            model.optimizer.build(model.trainable_variables)
        variables = [*model.variables, *model.optimizer.variables]
        for variable in variables:
            variable.assign(tf.cast(tf.fill(variable.shape, 5 + strategy.rank), variable.dtype))
        broadcast_state(model, strategy.extended)
        return {float(value) for variable in variables for value in np.ravel(variable.numpy())}

    assert on_ranks(ranks(2), work) == [{5.0}] * 2


def test_all_optimizers_of_a_model_are_broadcast(ranks):
    """Also those that the model or one of its layers has in an attribute, a list or a dictionary."""

    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            direct, listed, named, inner = (keras.optimizers.Adam(0.1) for _ in range(4))
            model.own, model.listed, model.layers[0].named = direct, [[listed]], {"a": named, 1: None}
            model.scaled = keras.optimizers.LossScaleOptimizer(inner)
            model.own.build(model.trainable_variables)
        optimizers = (direct, listed, named, inner)
        for variable in direct.variables:
            variable.assign(tf.cast(tf.fill(variable.shape, 5 + strategy.rank), variable.dtype))
        for optimizer in (listed, named, inner):
            optimizer.iterations.assign(5 + strategy.rank)
        broadcast_state(model, strategy.extended)
        return values_of(direct) | {int(optimizer.iterations) for optimizer in optimizers}

    def values_of(optimizer):
        return {float(value) for variable in optimizer.variables for value in np.ravel(variable.numpy())}

    assert on_ranks(ranks(2), work) == [{5.0}] * 2


def test_state_is_averaged_over_ranks_with_finite_values(ranks):
    """As a loop of the user's own leaves it; integers stay."""

    def work(strategy):
        model, layer = model_with_state(strategy)
        both, one, nobody, half, integer = (
            layer.kept[kind]
            for kind in [("float32", "mean"), ("float32", "sum"), ("float32", "none"), ("bfloat16", "mean"),
                         ("int32", "none")]
        )  # fmt: skip
        both.assign([1.0 + strategy.rank])
        one.assign([[np.nan, 7.0][strategy.rank]])
        nobody.assign([[np.nan, np.inf][strategy.rank]])
        half.assign([2.0 * strategy.rank])
        integer.assign([strategy.rank])
        average_state(model, strategy.extended)
        return [float(variable[0]) for variable in (both, one, half, integer)], float(nobody[0])

    (first, nan), (second, infinity) = on_ranks(ranks(2), work)
    assert (first, second) == ([1.5, 7.0, 1.0, 0.0], [1.5, 7.0, 1.0, 1.0])
    assert np.isnan(nan)
    assert np.isinf(infinity)
