"""When weights of which each process keeps rows are gathered, and how often; `tests/multiprocess` has real ones."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedShards
from tfdist.strategies.all_reduce.weight_parts_extended import WeightPartsExtended
from tfdist.strategies.divided import gathering, weight_parts
from tfdist.strategies.divided.gathering import Collectives


def kept(value, collectives):
    """A weight of which this process has the first two rows."""
    part = tf.Variable(value[:2])
    return types.SimpleNamespace(copy=part, collectives=collectives, value=value)


class Counted(Collectives):
    """Collectives of one process that has the others' rows, too, and counts the gathers of graphs."""

    def __init__(self):
        super().__init__(self._whole, self._own)
        self.gathers = []

    def _whole(self, weights):
        made = [tf.concat([weight.copy.read_value(), weight.value[2:]], 0) for weight in weights]
        self.gathers += made
        return made

    def _own(self, gradients, weights):
        return [tf.convert_to_tensor(gradient)[:2] for gradient in gradients]


def gradients_of(weight, x):
    """Gradients of a product with a weight, in the call of a layer."""
    with tf.GradientTape() as tape:
        with gathering.within(), gathering.calling([[weight]], [x]) as finished:
            whole = weight.collectives.read(weight)
            assert weight.collectives.read(weight) is whole
            outputs = finished(tf.tanh(tf.matmul(x, whole)))
        loss = tf.reduce_sum(outputs * outputs)
    return tape.gradient(loss, [x, weight.copy])


def reference(value, x):
    with tf.GradientTape() as tape:
        tape.watch([x, value])
        loss = tf.reduce_sum(tf.tanh(tf.matmul(x, value)) ** 2)
    by_x, by_value = tape.gradient(loss, [x, value])
    return by_x, by_value[:2]


@pytest.mark.parametrize("eager", [True, False])
def test_gradients_are_those_of_the_rows(eager):
    value, x = tf.random.normal([4, 3]), tf.Variable(tf.random.normal([5, 4]))
    collectives = Counted()
    weight = kept(value, collectives)

    def step():
        return gradients_of(weight, x)

    found = step() if eager else tf.function(step)()
    for mine, expected in zip(found, reference(value, tf.convert_to_tensor(x)), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)
    assert len(collectives.gathers) == (1 if eager else 2)


def test_the_backward_pass_uses_the_second_gather():
    """The first one is used by the forward pass alone, so that TensorFlow frees it."""
    value = tf.random.normal([4, 3])
    collectives = Counted()
    weight, x = kept(value, collectives), tf.Variable(tf.random.normal([5, 4]))
    graph = tf.function(lambda: gradients_of(weight, x)).get_concrete_function().graph
    forward, *backward = (operation for operation in graph.get_operations() if operation.type == "MatMul")
    again = {consumer.name for consumer in collectives.gathers[1].consumers()}
    by_name = {operation.name: operation for operation in backward}
    assert len(again & by_name.keys()) == 1, "the gradient by the inputs uses the weight"
    whole = next(given for given in forward.inputs if given.shape == (4, 3))
    assert {consumer.type for consumer in whole.consumers()} == {"MatMul"}
    assert [consumer.name for consumer in whole.consumers()] == [forward.name]


def test_a_weight_that_is_assigned_before_the_backward_pass_is_kept():
    value, x = tf.random.normal([4, 3]), tf.Variable(tf.random.normal([5, 4]))
    collectives = Counted()
    weight = kept(value, collectives)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            with gathering.within(), gathering.calling([[weight]], [x]) as finished:
                outputs = finished(tf.matmul(x, collectives.read(weight)))
            loss = tf.reduce_sum(outputs)
        weight.copy.assign(tf.zeros([2, 3]))
        return tape.gradient(loss, x)

    np.testing.assert_allclose(step(), np.broadcast_to(value.numpy().sum(1), (5, 4)), rtol=1e-5)
    assert len(collectives.gathers) == 1


@pytest.mark.parametrize("activation", [None, "softmax"])
def test_losses_find_the_logits_that_a_layer_keeps(activation):
    """And none where it keeps none: Keras's losses would take them for those of a softmax."""
    weight = kept(tf.random.normal([4, 3]), Counted())
    x, loss = tf.random.normal([5, 4]), keras.losses.CategoricalCrossentropy(from_logits=activation is None)

    @tf.function
    def step(gathers):
        with gathering.within(), gathering.calling([[weight]] if gathers else [], [x]) as finished:
            logits = tf.matmul(x, weight.collectives.read(weight))
            outputs = finished(keras.activations.get(activation)(logits))
        assert hasattr(outputs, "_keras_logits") == (activation is not None)
        return loss(tf.one_hot([0, 1, 2, 0, 1], 3), outputs)

    np.testing.assert_allclose(step(True), step(False), rtol=1e-6)


def test_weights_are_gathered_outside_of_loops_and_conditionals():
    collectives = Counted()
    weight = kept(tf.random.normal([4, 4]), collectives)

    @tf.function
    def step(x):
        with gathering.within():
            _, x = tf.while_loop(
                lambda step, _: step < 2, lambda step, x: (step + 1, tf.matmul(x, collectives.read(weight))), (0, x)
            )
        return x

    graph = step.get_concrete_function(tf.TensorSpec([1, 4])).graph
    assert [made.graph for made in collectives.gathers] == [graph]


def test_rows_are_those_of_the_whole_initial_value(ranks, monkeypatch):
    monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)

    def work(group):
        strategy = RankedShards(group, WeightPartsExtended)
        with strategy.scope():
            layer = keras.layers.Dense(3, kernel_initializer="orthogonal", kernel_constraint=None)
            layer.build((5, 4))
        rows = weight_parts.of(layer.kernel)
        assert layer.kernel._value is None
        assert layer.kernel.shape == (4, 3)
        assert layer.bias.shape == (3,)
        return rows.copy.numpy()

    parts = ranks(2)(work)
    assert [part.shape for part in parts] == [(2, 3), (2, 3)]
    whole = np.concatenate(parts)
    np.testing.assert_allclose(whole.T @ whole, np.eye(3), atol=1e-6)
