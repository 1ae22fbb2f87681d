import functools

import pytest
import tensorflow as tf

from tfdist.engine.host_calls import host_call


def test_host_calls_keep_their_order_in_conditionals_loops_and_functions():
    """Those in what is run late by itself, as it depends on a computation, come before what could run at once.

    TensorFlow keeps an order of what uses a variable, and another one of what uses none.
    """
    called, variable = [], tf.Variable(1.0)

    def call(value, name):
        def on_host(value):
            called.append(name)
            return value

        result = host_call(on_host, [value], tf.float32, name=name)
        result.set_shape(value.shape)
        return result

    def call_with_variable(value, name):
        return call(value * variable, name)

    inner = tf.function(functools.partial(call_with_variable, name="inner"))

    @tf.function
    def outer(value):
        late = value
        for _ in range(200):
            late = tf.linalg.matmul(late, value)
        results = [tf.cond(late[0, 0] > 0, lambda: call_with_variable(late, "then"), lambda: late), call(value, "next")]
        at = late[0, 0] * 0
        results.append(tf.while_loop(lambda at: at < 2, lambda at: call_with_variable(at + 1, "loop"), [at])[0])
        results.append(call(value, "after"))
        results.append(inner(late))
        results.append(call(value, "last"))
        return results

    outer(tf.eye(50))
    assert called == ["then", "next", "loop", "loop", "after", "inner", "last"]


def test_host_calls_keep_their_order_among_assertions_and_other_functions_of_python():
    called = []

    @tf.function
    def step(late):
        for _ in range(200):
            late = tf.linalg.matmul(late, late)
        tf.py_function(lambda value: called.append("before"), [late], [])
        host_call(lambda value: called.append("call"), [tf.constant(1.0)], [], name="call")
        tf.py_function(lambda value: called.append("after"), [tf.constant(1.0)], [])
        tf.debugging.Assert(late[0, 0] < 0, ["larger"])
        host_call(lambda value: called.append("never"), [tf.constant(1.0)], [], name="call")

    with pytest.raises(tf.errors.InvalidArgumentError, match="larger"):
        step(tf.eye(50))
    assert called == ["before", "call", "after"]


def test_host_calls_keep_their_order_in_the_gradient_of_a_function():
    """The one that is traced first, and late, is behind one large operation; the other one behind some small ones."""
    called = []

    @tf.custom_gradient
    def call_backward(value):
        def backward(gradient):
            def on_host(value):
                called.append("first" if value.shape[0] > 2 else "second")
                return value

            result = host_call(on_host, [gradient], tf.float32, name="call")
            result.set_shape(value.shape)
            return result

        return tf.identity(value), backward

    @tf.function
    def forward(large, small):
        late, soon = call_backward(large), call_backward(small)
        for _ in range(10):
            soon = tf.transpose(soon)
        return tf.linalg.matmul(late, large), soon

    large, small = tf.eye(1000), tf.eye(2)
    with tf.GradientTape() as tape:
        tape.watch([large, small])
        results = forward(large, small)
    tape.gradient(results, [large, small])
    assert called == ["first", "second"]
