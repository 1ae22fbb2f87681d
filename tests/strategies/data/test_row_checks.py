"""Batches whose components, or shares, have other rows than they must have."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import on_ranks
from tfdist.strategies.data import row_checks


def test_unequal_rows_of_components_raise():
    """Unless nothing is there but what stands in for a batch; scalars have no rows, and ragged tensors one a sample."""
    ragged = tf.ragged.constant([[1, 2, 3], [4]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2]])
    same = {"dense": tf.zeros([2, 3]), "ragged": ragged, "sparse": sparse, "scalar": tf.constant(5), "none": None}
    there = tf.constant(True)
    row_checks.equal_rows(same, there)
    row_checks.equal_rows(tf.zeros([3]), there)
    other = ({**same, "nodes": ragged.values}, tf.zeros([2]))
    row_checks.equal_rows(other, ~there)
    with pytest.raises(tf.errors.InvalidArgumentError) as eagerly:
        row_checks.equal_rows(other, there)

    @tf.function(reduce_retracing=True)
    def in_graph(nodes, labels):
        with tf.control_dependencies(row_checks.equal_rows((nodes, labels), there)):
            return tf.identity(nodes)

    in_graph(tf.zeros([4]), tf.zeros([4]))
    with pytest.raises(tf.errors.InvalidArgumentError) as in_a_graph:
        in_graph(tf.zeros([4]), tf.zeros([2, 1]))
    told = row_checks.readable(eagerly.value)
    assert str(told).endswith("Rows: 0/dense has 2, 0/nodes has 4, 0/ragged has 2, 0/sparse has 2, 1 has 2.")
    assert str(row_checks.readable(in_a_graph.value)).endswith("Rows: 0 has 4, 1 has 2.")
    assert row_checks.readable(tf.errors.InvalidArgumentError(None, None, "something else")) is None


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_stateful_model_with_fixed_global_batch_size_raises(ranks, method):
    x = np.random.default_rng(0).normal(size=(8, 5, 3)).astype("float32")
    given = {"batch_size": 4, "verbose": 0, **({} if method == "predict" else {"y": x[:, 0]})}

    def work(strategy):
        outcomes = []
        for rows in (2, 4):
            with strategy.scope():
                layers = [keras.layers.Input(batch_shape=(rows, 5, 3)), keras.layers.SimpleRNN(3, stateful=True)]
                model = keras.Sequential(layers)
                model.compile("sgd", "mse")
            try:
                getattr(model, method)(x, **given)
            except ValueError as error:
                outcomes.append(str(error))
        return outcomes

    for (told,) in on_ranks(ranks(2), work):
        assert told.startswith(
            "the model accepts only batches of 4 rows, because its inputs have batch_shape=(4, …)"
        ), told
        assert "this replica got 2 rows" in told


def test_a_model_without_state_takes_batches_of_any_size_as_in_plain_keras(ranks):
    x = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")

    def trained(scope):
        with scope:
            kernel = keras.initializers.RandomNormal(seed=1)
            layers = [keras.layers.Input(batch_shape=(4, 3)), keras.layers.Dense(3, kernel_initializer=kernel)]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    expected = trained(contextlib.nullcontext())
    for weights in on_ranks(ranks(2), lambda strategy: trained(strategy.scope())):
        for weight, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(weight, other, rtol=1e-5)


@pytest.mark.parametrize(("rows", "fixed"), [(None, None), (5, 5)])
def test_rows_of_model_returns_fixed_batch_size(rows, fixed):
    model = keras.Sequential([keras.layers.Input(batch_shape=(rows, 2)), keras.layers.Dense(1)])
    assert row_checks.rows_of_model(model) == fixed
    assert row_checks.rows_of_model(keras.Sequential([keras.layers.Dense(1)])) is None
