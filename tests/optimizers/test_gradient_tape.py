"""In a process alone; `tests/multiprocess/test_distributed_optimizer.py` has several."""

import pytest
import tensorflow as tf

import tfdist


@pytest.fixture(autouse=True)
def initialized():
    tfdist.init()


def test_tape_keeps_jacobian_output_gradients_and_watched_variables():
    x, variable = tf.constant([1.0, 2.0]), tf.Variable(1.0)
    with tfdist.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        tape.watch(x)
        y = variable * x * x
    assert tape.gradient(y, {"x": x})["x"].numpy().tolist() == [2, 4]
    assert tape.gradient(y, x, output_gradients=tf.constant([1.0, 0.0])).numpy().tolist() == [2, 0]
    assert tape.jacobian(y, x).numpy().tolist() == [[2, 0], [0, 4]]
    (watched,) = tape.watched_variables()
    assert watched is variable


def test_none_where_there_is_no_gradient():
    with tf.GradientTape() as tape:
        y = tf.constant(1.0)
    assert tfdist.DistributedGradientTape(tape).gradient(y, [tf.Variable(1.0)]) == [None]
