"""A server's updates against the same optimizer in a plain model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.parameter_server.store import Store

PATHS = ["dense/kernel", "dense/bias"]


def values():
    generator = np.random.default_rng(0)
    return [generator.normal(size=shape).astype(np.float32) for shape in ((4, 3), (3,))]


def gradients(step):
    generator = np.random.default_rng(step)
    return [generator.normal(size=shape).astype(np.float32) for shape in ((4, 3), (3,))]


def store_of(optimizer):
    return Store(PATHS, values(), keras.optimizers.serialize(optimizer))


def plain(optimizer, updates):
    """The values after updates by the optimizer itself."""
    variables = [keras.Variable(value) for value in values()]
    optimizer.build(variables)
    for update in updates:
        optimizer.apply([tf.convert_to_tensor(one) for one in update], variables)
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
        lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.7),
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), clipvalue=0.3),
        lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=2),
        lambda: keras.optimizers.Lion(0.01),
    ],
)
def test_updates_are_those_of_the_optimizer(make):
    store = store_of(make())
    for step in range(5):
        store.update([gradients(step)], [1.0])
    for one, other in zip(store.values(), plain(make(), [gradients(step) for step in range(5)]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert store.iterations == 5


def test_several_pushes_make_one_update_by_their_weights():
    store = store_of(keras.optimizers.SGD(0.1, momentum=0.9))
    store.update([gradients(0), gradients(1), gradients(2)], [0.5, 0.25, 0.125])
    mean = [0.5 * a + 0.25 * b + 0.125 * c for a, b, c in zip(*map(gradients, range(3)), strict=True)]
    for one, other in zip(store.values(), plain(keras.optimizers.SGD(0.1, momentum=0.9), [mean]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert store.iterations == 1


def test_variables_without_a_gradient_stay():
    store = store_of(keras.optimizers.SGD(1.0))
    store.update([[None, np.ones(3, np.float32)], [None, None]], [1.0, 1.0])
    kernel, bias = store.values()
    np.testing.assert_array_equal(kernel, values()[0])
    np.testing.assert_allclose(bias, values()[1] - 1, rtol=1e-6)
    store.update([[None, None]], [1.0])
    assert store.iterations == 1, "no gradient, no update"


def test_sparse_gradients():
    """Alone, and beside a dense one; an index may occur twice."""
    rows, indices = np.ones((3, 3), np.float32), np.array([0, 2, 2])
    expected = values()[0]
    expected[0] -= 2
    expected[2] -= 4
    for other in (None, np.zeros((4, 3), np.float32)):
        store = store_of(keras.optimizers.SGD(1.0))
        store.update([[(rows, indices), None], [other, None]], [2.0, 1.0])
        np.testing.assert_allclose(store.values()[0], expected, rtol=1e-6)


def test_values_are_not_changed_by_later_updates():
    store = store_of(keras.optimizers.SGD(1.0))
    before = store.values()
    kept = [value.copy() for value in before]
    store.update([gradients(0)], [1.0])
    for one, other in zip(before, kept, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_learning_rate_can_be_set():
    store = store_of(keras.optimizers.SGD(1.0))
    store.set_learning_rate(0.5)
    store.update([gradients(0)], [1.0])
    np.testing.assert_allclose(store.values()[0], values()[0] - 0.5 * gradients(0)[0], rtol=1e-6)


def test_a_schedule_cannot_be_overruled():
    store = store_of(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        store.set_learning_rate(0.5)
