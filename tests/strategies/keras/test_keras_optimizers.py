"""Optimizers over ranks, whose gradients differ, compared with Keras's on one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, in_step, on_ranks

rng = np.random.default_rng(0)
GRADIENTS = rng.normal(size=(4, 2, 3)).astype(np.float32)
"""By step and rank."""


class OwnClipping(keras.optimizers.SGD):
    """Scales gradients of the whole batch, without a call of Keras's method."""

    def _clip_gradients(self, grads):
        return [gradient / (1 + tf.reduce_max(tf.abs(gradient))) for gradient in grads]


class OwnAndKerasClipping(OwnClipping):
    def _clip_gradients(self, grads):
        return keras.optimizers.SGD._clip_gradients(self, super()._clip_gradients(grads))


def test_updates_outside_of_replicas_are_reported_once(ranks, caplog):
    """Each process would train by itself."""

    def work(strategy, is_outside):
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([keras.Variable(np.zeros(2), name="weight")])
        for _ in range(2):
            optimizer.apply([tf.ones(2)]) if is_outside else strategy.run(lambda: optimizer.apply([tf.ones(2)]))

    def said(size, is_outside):
        caplog.clear()
        on_ranks(ranks(size), lambda strategy: work(strategy, is_outside))
        return sum("outside of `strategy.run`" in record.message for record in caplog.records)

    assert [said(2, False), said(1, True), said(2, True)] == [0, 0, 1]


@pytest.mark.parametrize("function", [tf.function, lambda step: step], ids=["in a graph", "eagerly"])
@pytest.mark.parametrize("size", [1, 2])
def test_updates_outside_of_replicas_build_the_optimizer(ranks, size, function):
    """As in Keras's guide to loops, where the first update makes the variables; outside of the scope, too."""

    def work(strategy):
        with strategy.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=1.0)
            variable = keras.Variable(np.ones(2), name="weight")
        step = function(lambda: optimizer.apply([tf.ones(2)], [variable]))
        for _ in range(2):
            step()
        return variable.numpy()

    for found in on_ranks(ranks(size), work):
        np.testing.assert_allclose(found, [0.71, 0.71], rtol=1e-6)


OPTIMIZERS = {
    "own clipping": lambda: OwnClipping(0.1),
    "own clipping and Keras's": lambda: OwnAndKerasClipping(0.1, clipnorm=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.3),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "weight decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5),
    "moving average": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, clipnorm=0.5),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, clipnorm=0.5), initial_scale=4),
}


def alone(make, gradients):
    optimizer, variable = make(), keras.Variable(np.ones(3, np.float32))
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient)], [variable])
    return variable.numpy()


def eagerly(function):
    """Takes the place of `tf.function`."""
    return function


def trained(strategy, make, gradients, samples=None, function=tf.function):
    """Returns a variable after steps with the rank's own gradients.

    Args:
        strategy: strategy of the rank.
        make: makes an optimizer.
        gradients: gradients by step and rank.
        samples: number of samples of each rank's share, in all steps or by step; None outside of Keras's steps.
        function: how steps are called.
    """
    with strategy.scope():
        optimizer, variable = make(), keras.Variable(np.ones(3, np.float32))
        optimizer.build([variable])

    @function
    def step(gradient, rows, total):
        def apply():
            optimizer.apply([gradient], [variable])

        if samples is None:
            strategy.run(apply)
        else:
            in_step(strategy, rows, total, apply)

    for of_ranks, counts in zip(
        gradients, np.broadcast_to((1, 1) if samples is None else samples, (4, 2)), strict=True
    ):
        step(tf.constant(of_ranks[strategy.rank]), tf.constant(counts[strategy.rank]), tf.constant(sum(counts)))
    return variable.numpy()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_outside_of_steps_gradients_are_summed_before_anything_is_done_to_them(ranks, name):
    """As one process has them, which gets the sum."""
    for value in on_ranks(ranks(2), trained, OPTIMIZERS[name], GRADIENTS):
        np.testing.assert_allclose(value, alone(OPTIMIZERS[name], GRADIENTS.sum(1)), rtol=1e-5)


def summed_in_half(group, make, float32_sums, steps=1):
    """A variable of half precision after steps with a gradient of 256 on the first rank, and of 1 on the others."""
    strategy = Ranked(group, float32_sums=float32_sums)
    with strategy.scope():
        optimizer, variable = make(), keras.Variable(tf.zeros(1, tf.bfloat16), dtype="bfloat16")
        optimizer.build([variable])
    gradient = tf.constant([1.0 if group.rank else 256.0], tf.bfloat16)

    def apply():
        optimizer.apply([gradient], [variable])

    step = tf.function(lambda: strategy.run(apply))
    for _ in range(steps):
        step()
    assert variable.dtype == "bfloat16"
    return float(variable[0])


@pytest.mark.parametrize(("float32_sums", "expected"), [(False, -256), (True, -258)])
def test_sums_of_half_precision_are_rounded_once_if_they_are_in_float32(ranks, float32_sums, expected):
    """Numbers of bfloat16 from 256 on are even: 256 + 1 is 256, but 256 + 1 + 1 is 258."""
    values = ranks(3)(lambda group: summed_in_half(group, lambda: keras.optimizers.SGD(1.0), float32_sums))
    assert values == [expected] * 3


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1.0), 1),
        (lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), 2),
    ],
    ids=["loss scale", "accumulation"],
)
def test_float32_sums_are_for_scaled_and_accumulated_gradients_too(ranks, make, steps):
    assert ranks(3)(lambda group: summed_in_half(group, make, True, steps)) == [-258] * 3


@pytest.mark.parametrize(("samples", "function"), [((5, 1), eagerly), ((6, 0), tf.function)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_in_steps_are_weighted_by_samples(ranks, name, samples, function):
    """And an empty share's NaN counts for nothing."""
    gradients = GRADIENTS.copy()
    if not samples[1]:
        gradients[:, 1] = np.nan
    expected = alone(OPTIMIZERS[name], np.average(GRADIENTS, axis=1, weights=samples).astype(np.float32))
    for value in on_ranks(ranks(2), trained, OPTIMIZERS[name], gradients, samples, function):
        np.testing.assert_allclose(value, expected, rtol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradient_weights_follow_samples_of_each_step(ranks, name):
    """Where gradients are accumulated, too, which are summed in a later step than they are of."""
    samples = np.array([(5, 1), (1, 3), (2, 2), (1, 6)])
    weights = (samples / samples.sum(axis=1, keepdims=True))[:, :, np.newaxis]
    expected = alone(OPTIMIZERS[name], (GRADIENTS * weights).sum(axis=1).astype(np.float32))
    for value in on_ranks(ranks(2), trained, OPTIMIZERS[name], GRADIENTS, samples):
        np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_all_bits_are_equal_on_all_ranks(ranks):
    values = on_ranks(ranks(2), trained, OPTIMIZERS["clipnorm"], GRADIENTS, (5, 1))
    assert values[0].tobytes() == values[1].tobytes()


def test_one_ranks_infinity_makes_all_skip_the_step(ranks):
    gradients = GRADIENTS.copy()
    gradients[1, 1] = np.inf
    expected = alone(
        OPTIMIZERS["loss scale"], np.stack([GRADIENTS[0].sum(0), np.full(3, np.inf), *GRADIENTS[2:].sum(1)])
    )
    assert np.isfinite(expected).all()
    for value in on_ranks(ranks(2), trained, OPTIMIZERS["loss scale"], gradients):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_overwrite_with_gradient_takes_maximum_over_ranks(ranks):
    """As the ranges of float8."""

    def work(strategy):
        with strategy.scope():
            optimizer, value = keras.optimizers.SGD(1.0), keras.Variable(np.zeros(2, np.float32))
            value.overwrite_with_gradient = True
            other = keras.Variable(np.zeros(1, np.float32))
            optimizer.build([value, other])
        gradients = [tf.constant([strategy.rank + 1.0, -strategy.rank]), tf.constant([1.0])]
        tf.function(lambda: strategy.run(lambda: optimizer.apply(list(gradients), [value, other])))()
        return value.numpy().tolist(), other.numpy().tolist()

    assert on_ranks(ranks(2), work) == [([2.0, 0.0], [-2.0])] * 2


def test_sparse_gradients_are_those_of_all_ranks(ranks):
    def work(strategy):
        with strategy.scope():
            optimizer, variable = keras.optimizers.SGD(1.0), keras.Variable(np.zeros((4, 2), np.float32))
            optimizer.build([variable])
        slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([strategy.rank, 3]), tf.constant([4, 2]))
        in_step(strategy, (3, 1)[strategy.rank], 4, lambda: optimizer.apply([slices], [variable]))
        return (-variable.numpy()[:, 0]).tolist()

    assert on_ranks(ranks(2), work) == [[0.75, 0.25, 0.0, 1.0]] * 2
