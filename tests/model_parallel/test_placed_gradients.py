"""Gradients are made where the forward pass was, also second ones and those in Python."""

import tensorflow as tf

from tests.model_parallel.executed import executed, places
from tfdist.model_parallel import placed_gradients
from tfdist.model_parallel.placed_gradients import placed

placed_gradients.install()


@tf.custom_gradient
def cubed(x):
    def grad(upstream):
        return 3.0 * tf.sinh(x) * upstream

    return x**3, grad


def test_second_order_gradients_run_on_scope_device():
    x = tf.Variable([2.0])

    @tf.function
    def second():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner, placed("/device:CPU:2"):
                y = tf.sin(x) * tf.cos(x)
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    operations = executed(second)
    assert set(places(operations, "Sin")) == set(places(operations, "Cos")) == {"CPU:2"}
    assert [operation for operation in operations if operation.is_elsewhere] == []


def test_python_gradients_run_on_scope_device():
    x = tf.Variable([2.0])

    @tf.function
    def first():
        with tf.GradientTape() as tape, placed("/device:CPU:1"):
            y = cubed(x)
        return tape.gradient(y, x)

    assert places(executed(first), "Sinh") == {"CPU:1": 1}


def test_the_innermost_scope_counts():
    x = tf.Variable([2.0])

    @tf.function
    def first():
        with tf.GradientTape() as tape, placed("/device:CPU:1"):
            y = tf.sin(x)
            with placed("/device:CPU:2"):
                y = tf.sinh(y)
        return tape.gradient(y, x)

    operations = executed(first)
    assert places(operations, "Cosh") == {"CPU:2": 1}
    assert places(operations, "Cos") == {"CPU:1": 1, "CPU:2": 1}, "the gradients of both, Cos and Cosh"


def test_gradients_of_loops_and_conditionals_run_on_scope_device():
    x = tf.Variable([1.5])

    @tf.function
    def first(count):
        with tf.GradientTape() as tape, placed("/device:CPU:2"):
            y = tf.identity(x)
            for _ in tf.range(count):
                y = tf.sin(y)
            y = tf.cond(y > 0, lambda: tf.sinh(y), lambda: y)
        return tape.gradient(y, x)

    operations = executed(lambda: first(tf.constant(3)))
    for part in ("Sin", "Cos", "Sinh", "Cosh"):
        assert set(places(operations, part)) == {"CPU:2"}, part


def test_without_a_scope_nothing_changes():
    x = tf.Variable([2.0])

    @tf.function
    def first():
        with tf.GradientTape() as tape:
            y = tf.sin(x)
        return tape.gradient(y, x)

    assert set(places(executed(first), "Cos")) == {"CPU:0"}
