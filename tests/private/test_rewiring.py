"""Operations of a graph under construction that are given another tensor of the same value."""

import tensorflow as tf

from tfdist.private import rewiring


def uses(tensor):
    return {consumer.name for consumer in tensor.consumers()}


def test_younger_operations_use_the_other_tensor():
    """Also those that use a cast or a transpose of the first one, which are made again."""

    @tf.function
    def step(x):
        first = tf.identity(x, name="first")
        cast = tf.cast(tf.transpose(first), tf.float64)
        before = tf.reduce_sum(first, name="before") + tf.cast(tf.reduce_sum(cast, name="cast_before"), tf.float32)
        since = tf.constant(0).op
        second = tf.identity(x, name="second")
        after = tf.reduce_sum(first * first, name="after") + tf.cast(tf.reduce_sum(cast, name="cast_after"), tf.float32)
        product = next(consumer for consumer in first.consumers() if consumer.type == "Mul")
        rewiring.redirect(first, second, since)
        assert {given.name for given in product.inputs} == {second.name}
        assert "before" in uses(first)
        assert product.name not in uses(first)
        assert not any("after" in name for name in uses(cast))
        assert "cast_before" in uses(cast)
        return before, after

    before, after = step(tf.constant([[1.0, 2.0], [3.0, 4.0]]))
    assert float(before) == 20.0
    assert float(after) == 40.0


def test_assignments_are_seen():
    variable = tf.Variable(1.0)

    @tf.function
    def step():
        first = variable.read_value()
        handle = tf.compat.v1.get_default_graph().capture(variable.handle)
        variable.read_value()
        assert not rewiring.is_written_since(handle, first.op)
        variable.assign_add(1.0)
        assert rewiring.is_written_since(handle, first.op)

    step()
