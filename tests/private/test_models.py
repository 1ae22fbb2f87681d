"""Private members of Keras's models, layers, graphs and variables, on models."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.private import models

X = np.ones((4, 2), np.float32)


@pytest.fixture
def model():
    layers = [keras.layers.Dense(3, name="first"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    made = keras.Sequential([keras.layers.Input((2,)), *layers])
    made.compile("sgd", "mse", metrics=["mae"])
    return made


def test_layers_states_and_metrics_are_found(model):
    layers = models.layers_of(model)
    assert layers[0] is model
    assert set(layers) > {model, *model.layers}
    first, normalization, _ = model.layers
    first.trainable = False
    assert models.state_of(first) == []
    assert models.state_of(normalization) == [normalization.moving_mean, normalization.moving_variance]
    layer = keras.layers.Dense(1)
    layer.own = keras.metrics.Mean("own")
    assert models.metrics_in(layer) == [layer.own]
    assert models.metrics_in(layer.own) == []


def test_begin_at_sets_initial_epoch(model):
    assert models.initial_epoch(model) == 0
    history = model.fit(
        X,
        X[:, :1],
        epochs=5,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_begin=lambda logs: models.begin_at(model, 3))],
    )
    assert history.epoch == [3, 4]
    assert models.initial_epoch(model) == 3
    models.begin_at(model, None)
    assert models.initial_epoch(model) == 0


def test_losses_are_computed_tracked_and_forgotten(model):
    y = X[:, :1]
    loss = models.compute_loss(model, x=X, y=y, y_pred=y + 2, sample_weight=None, training=True)
    assert float(loss) == 4.0
    model.evaluate(X, y, verbose=0)
    assert models.loss_tracker(model) is model.metrics[0]
    regularized = keras.layers.Dense(1, activity_regularizer="l2")
    regularized(X)
    assert len(regularized.losses) == 1
    models.forget_losses(regularized)
    assert regularized.losses == []


def test_strategies_and_values_of_variables_are_found(model):
    assert models.strategy_of(model) is None
    assert models.strategy_of(object(), "otherwise") == "otherwise"
    variable = model.weights[0]
    assert isinstance(models.value_of(variable), tf.Variable)
    assert models.value_of(variable) is variable.value
    assert models.initializer_of(variable) is None
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        inside = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    assert models.strategy_of(inside) is inside.distribute_strategy
    assert models.strategy_of(models.value_of(inside.weights[0])) is inside.distribute_strategy


def test_graph_inputs_outputs_and_nodes_are_found(model):
    one, other = keras.Input((2,), name="one"), keras.Input((2,), name="other")
    total = keras.layers.Add()([one, other])
    graph = keras.Model({"one": one, "other": other}, {"sum": total})
    assert models.graph_of(graph) is graph
    assert models.graph_of(model) is not model
    assert models.graph_of(keras.Sequential([keras.layers.Dense(1)])) is not None
    assert models.inputs_of(graph) == [one, other]
    assert models.outputs_of(graph) == [total]
    assert models.structure_of_inputs(graph).keys() == {"one", "other"}
    assert models.structure_of_outputs(graph).keys() == {"sum"}
    given = models.standardized(graph, {"other": 2 * X, "one": X})
    np.testing.assert_array_equal(given, [X, 2 * X])
    operations = [node.operation for node in models.nodes_of(models.graph_of(model)) if not node.is_input]
    assert operations == model.layers
    assert "training" in models.arguments_of_context(keras.layers.Dropout(0.5))
    assert models.arguments_of_context(object()) == ()


def test_logits_can_be_read_and_set():
    made = keras.layers.Activation("softmax")(X)
    assert models.logits_of(tf.constant(1.0)) is None
    np.testing.assert_array_equal(models.logits_of(made), X)
    joined = tf.concat([made, made], 0)
    models.set_logits(joined, tf.concat([X, X], 0))
    assert models.logits_of(joined).shape == (8, 2)


def test_own_variables_are_without_those_of_layers_within():
    layer = keras.layers.TimeDistributed(keras.layers.BatchNormalization())
    layer.build((None, 2, 3))
    assert models.own_variables(layer) == []
    assert len(models.own_variables(layer.layer)) == 4
