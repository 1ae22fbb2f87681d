"""Tensors of variables, as vectors of servers and back; in a graph and eagerly."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.parameter_server.worker.model import Model
from tfdist.strategies.servers.server_vectors import PushAnswerLayout, kinds_of, tensors_for_server

SHAPES = [(600, 150), (3,), (500, 2), ()]
"""The first is split over servers."""


def model_of(servers):
    paths = [f"v{place}" for place in range(len(SHAPES))]
    return Model(paths, SHAPES, [np.dtype(np.float32)] * len(SHAPES), servers, [True] * len(SHAPES))


def variables():
    return [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]


def tensors():
    generator = np.random.default_rng(0)
    return [tf.constant(generator.normal(size=shape), tf.float32) for shape in SHAPES]


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_values_survive_the_round_trip_through_server_vectors(servers, in_graph):
    model, targets = model_of(servers), variables()

    def there_and_back(given):
        vectors = [tensor for server in range(servers) for tensor in tensors_for_server(server, given, model)]
        answered = PushAnswerLayout(kinds_of(given, model), model)
        assert [(each.shape, each.dtype) for each in vectors] == [(each.shape, each.dtype) for each in answered.specs]
        answered.assign_to(targets, vectors)

    (tf.function(there_and_back) if in_graph else there_and_back)(tensors())
    for variable, other in zip(targets, tensors(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), other)


def test_rows_go_to_the_server_that_has_them():
    model = model_of(2)
    rows = tf.reshape(tf.range(450, dtype=tf.float32), (3, 150))
    gradients = [tf.IndexedSlices(rows, tf.constant([299, 300, 299]), tf.constant(SHAPES[0])), None, None, None]
    kinds = kinds_of(gradients, model)
    for server, places in enumerate(([0, 2], [1])):
        assert kinds[server][0] == "sparse"
        assert set(kinds[server][1:]) <= {"none"}
        sent_rows, indices = tensors_for_server(server, gradients, model)
        np.testing.assert_array_equal(sent_rows, rows.numpy()[places])
        assert indices.numpy().tolist() == [[299, 299], [0]][server]


@pytest.mark.parametrize("in_graph", [False, True])
def test_rows_are_scattered(in_graph):
    """Rows of variables on two servers and on one are scattered; other variables are assigned."""
    model, targets = model_of(2), variables()
    rows = tf.reshape(tf.range(300, dtype=tf.float32), (2, 150))
    given = [
        tf.IndexedSlices(rows, tf.constant([299, 300]), tf.constant(SHAPES[0])),
        tf.ones(3),
        tf.IndexedSlices(tf.ones((1, 2)), tf.constant([499]), tf.constant(SHAPES[2])),
        tf.constant(7.0),
    ]

    def scatter():
        tensors = [tensor for server in range(2) for tensor in tensors_for_server(server, given, model)]
        PushAnswerLayout(kinds_of(given, model), model).assign_to(targets, tensors)

    (tf.function(scatter) if in_graph else scatter)()
    for variable, expected in zip(targets, given, strict=True):
        np.testing.assert_array_equal(variable.numpy(), tf.convert_to_tensor(expected))
