"""Parts of sums of gradients; `test_keras_sharded.py` has the sums."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.sharding import Ownership
from tfdist.strategies.all_reduce import owned_gradients

ROWS = Ownership(None, (0, 2, 5))


@pytest.mark.parametrize(("rank", "rows"), [(0, slice(0, 2)), (1, slice(2, 5))])
def test_a_process_gets_its_rows(rank, rows):
    whole = np.arange(10.0).reshape(5, 2)
    np.testing.assert_array_equal(owned_gradients.rows_of(tf.constant(whole), ROWS, rank), whole[rows])
    sparse = tf.IndexedSlices(tf.constant(whole[[4, 1, 4, 0]]), tf.constant([4, 1, 4, 0]), tf.constant([5, 2]))
    found = owned_gradients.rows_of(sparse, ROWS, rank)
    expected = tf.convert_to_tensor(sparse).numpy()[rows]
    np.testing.assert_array_equal(tf.convert_to_tensor(found), expected)


def test_what_is_whole_stays_whole():
    whole = tf.ones((5, 2))
    assert owned_gradients.rows_of(whole, Ownership(1), 1) is whole


def test_variables_of_keras_have_paths():
    with keras.name_scope("layer"):
        assert owned_gradients.name_of(keras.Variable(1.0, name="kernel")) == "layer/kernel"
    assert owned_gradients.name_of(tf.Variable(1.0, name="v")) == "v:0"
