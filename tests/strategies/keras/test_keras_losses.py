import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, in_step, on_ranks
from tfdist.strategies.keras.keras_losses import micro_batch_losses, noting_divisors, scale_summed_loss

rng = np.random.default_rng(0)
Y, P = rng.normal(size=(2, 7, 5, 2)).astype(np.float32)
WEIGHTS = rng.uniform(0, 2, (7, 5)).astype(np.float32)
MASK = rng.random((7, 5)) < 0.4
SHARES = pytest.mark.parametrize("sizes", [(4, 3), (6, 1), (7, 0)])
"""How many samples each rank has. Who has none has a row that stands in for some."""


def share_of(array, sizes, rank):
    begin = sum(sizes[:rank])
    return array[begin : begin + sizes[rank]] if sizes[rank] else np.zeros_like(array[:1])


def weighed_sum(ranks, sizes, function):
    """Returns what gradients are reduced to: the sum over ranks, weighted by samples.

    Args:
        ranks: the fixture of this name.
        sizes: numbers of samples of the shares.
        function: loss, from a function that returns a rank's share of an array.
    """

    def work(strategy):
        def loss():
            value = function(lambda array: share_of(array, sizes, strategy.rank))
            return tf.cast(value, tf.float64) * strategy.extended.shares.weight()

        return in_step(strategy, sizes[strategy.rank], sum(sizes), loss)

    parts = [part.numpy() for part in on_ranks(ranks(2), work)]
    assert sizes[1] or parts[1] == 0
    return sum(parts)


@SHARES
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weights"])
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_shares_make_up_the_loss_of_the_whole_batch(ranks, sizes, reduction, weights):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    expected = loss(Y, P, sample_weight=weights)
    total = weighed_sum(
        ranks, sizes, lambda share: loss(share(Y), share(P), None if weights is None else share(weights))
    )
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def masked(predictions, mask):
    predictions = tf.constant(predictions)
    predictions._keras_mask = tf.constant(mask)
    return predictions


@SHARES
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_masked_shares_make_up_the_whole_loss(ranks, sizes, reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    total = weighed_sum(ranks, sizes, lambda share: loss(share(Y), masked(share(P), share(MASK))))
    np.testing.assert_allclose(total, loss(Y, masked(P, MASK)), rtol=1e-5)


@SHARES
@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight", "sum_over_batch_size"])
def test_parts_of_shares_make_up_the_loss_of_the_whole_batch(ranks, sizes, reduction):
    """Each share is divided into its first row and the others; divisors are those of the whole batch."""
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    with noting_divisors() as divisors:
        expected = loss(Y, P, sample_weight=WEIGHTS)

    def of_parts(share):
        rows, total = len(share(Y)), 0.0
        for part in (slice(0, 1), slice(1, rows)):
            weight = len(range(rows)[part]) / rows
            if weight:
                with micro_batch_losses(divisors, tf.constant(weight, tf.float64)):
                    total += loss(share(Y)[part], share(P)[part], share(WEIGHTS)[part]) * weight
        return total

    np.testing.assert_allclose(weighed_sum(ranks, sizes, of_parts), expected, rtol=1e-5)


@SHARES
@pytest.mark.parametrize(
    "loss",
    [
        lambda share: scale_summed_loss(tf.reduce_sum(share(Y) ** 2)),
        lambda share: tf.nn.compute_average_loss(tf.reduce_sum(share(Y) ** 2, [1, 2]), global_batch_size=1),
        lambda share: gradient_of_factor(lambda factor: factor * tf.reduce_sum(share(Y) ** 2, [1, 2])),
        lambda share: scale_summed_loss(tf.reduce_sum(tf.cast(share(Y), tf.bfloat16) ** 2)),
    ],
    ids=["scale_summed_loss", "compute_average_loss", "a loss for each sample", "bfloat16"],
)
def test_summed_losses_add_up_over_shares(ranks, sizes, loss):
    np.testing.assert_allclose(
        weighed_sum(ranks, sizes, loss), (Y**2).sum(), rtol=1e-2
    )  # half precision adds up to so much


def gradient_of_factor(target, watched=False, output_gradients=None):
    """The gradient of a variable 1, or of a tensor, from a function of it."""
    factor = tf.constant(1.0) if watched else tf.Variable(1.0)
    with tf.GradientTape() as tape:
        tape.watch(factor)
        value = target(factor)
    return tape.gradient(value, factor, output_gradients=output_gradients)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: gradient_of_factor(lambda factor: factor * tf.ones([2])), 8),
        (lambda: gradient_of_factor(lambda factor: scale_summed_loss(factor * tf.ones([2]))), 8),
        (lambda: gradient_of_factor(lambda factor: 2 * scale_summed_loss(factor * tf.ones([2]))), 16),
        (lambda: gradient_of_factor(lambda factor: factor * 2), 2),
        (lambda: gradient_of_factor(lambda factor: factor * tf.ones([3])), 3),
        (lambda: gradient_of_factor(lambda factor: factor * tf.ones([2]), watched=True), 2),
        (lambda: gradient_of_factor(lambda factor: factor * tf.ones([2]), output_gradients=tf.ones([2])), 2),
        (lambda: gradient_of_factor(lambda factor: [factor * tf.ones([2])]), 2),
    ],
    ids=[
        "a loss for each sample",
        "marked",
        "twice what is marked",
        "one number",
        "other numbers",
        "of a tensor",
        "with gradients",
        "a list",
    ],
)
def test_gradients_of_losses_for_each_sample_are_those_of_sums(ranks, call, expected):
    """Gradients of other targets are left alone, as nobody knows what these are sums of."""
    strategy = Ranked(ranks(1).groups[0])
    assert float(in_step(strategy, 2, 8, call)) == expected


@pytest.mark.parametrize(("rows", "expected"), [(None, 8), (2, 2)])
def test_gradients_in_graphs_are_those_of_sums_where_the_number_of_losses_is_that_of_rows(ranks, rows, expected):
    strategy = Ranked(ranks(1).groups[0])
    factor = tf.Variable(1.0)

    @tf.function(input_signature=[tf.TensorSpec([rows])])
    def gradient(losses):
        with tf.GradientTape() as tape:
            target = factor * losses
        return tape.gradient(target, factor)

    assert float(in_step(strategy, 2, 8, lambda: gradient(tf.ones([2])))) == expected


def test_regularization_counts_in_full(ranks):
    """Keras's and TensorFlow's own rule is for sums over replicas; under `fit` there are means."""
    strategy = Ranked(ranks(1).groups[0])
    for samples in (8, 2):
        scaled = in_step(strategy, samples, 8, lambda: tf.nn.scale_regularization_loss(tf.constant([1.0, 2.0])))
        assert scaled.numpy() == 3.0


@pytest.mark.parametrize("size", [1, 2])
def test_losses_outside_steps_equal_tensorflow(ranks, size):
    """Sums over replicas, as TensorFlow has them."""

    def work(strategy):
        def replica():
            return (
                scale_summed_loss(tf.constant(6.0)),
                tf.nn.compute_average_loss(tf.constant([1.0, 2.0]), global_batch_size=3),
                tf.nn.scale_regularization_loss(tf.constant([4.0])),
                keras.losses.MeanSquaredError(reduction="sum")(Y, P),
            )

        return [float(value) for value in strategy.run(replica)], float(scale_summed_loss(1.5))

    whole = float(keras.losses.MeanSquaredError(reduction="sum")(Y, P))
    for (summed, average, regularization, keras_sum), outside in on_ranks(ranks(size), work):
        assert (summed, average, regularization, outside) == (6.0, 1.0, 4.0 / size, 1.5)
        assert keras_sum == pytest.approx(whole, rel=1e-6)


def test_scalar_metric_updates_are_weighted_by_samples(ranks):
    """As the loss that Keras tells a mean; with a weight of its own it counts by that."""
    strategy = Ranked(ranks(1).groups[0])
    with strategy.scope():
        plain, weighted, of_rows = (keras.metrics.Mean() for _ in range(3))

    def step(loss):
        plain.update_state(loss)
        weighted.update_state(loss, sample_weight=1.0)
        of_rows.update_state([loss, loss])

    for samples, loss in ((6, 1.0), (2, 5.0), (0, 100.0)):
        in_step(strategy, samples, 8, step, tf.constant(loss))
    assert float(plain.result()) == 2.0
    assert float(weighted.result()) == pytest.approx(106 / 3)
    assert float(of_rows.result()) == pytest.approx(106 / 3)


class Added(keras.layers.Layer):
    """Adds the mean of its inputs' squares to the loss."""

    def call(self, given):
        """Passes on what it is given."""
        self.add_loss(keras.ops.mean(keras.ops.square(given)))
        return given


def test_losses_that_layers_add_are_those_of_the_own_replica(ranks):
    """Replicas of two devices wait for each other within the forward pass, and are called in turn."""
    x, y = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32), np.ones((12, 1), np.float32)
    ended = []
    for devices in (["CPU:0"], ["CPU:1", "CPU:2"]):
        keras.utils.set_random_seed(0)
        with Ranked(ranks(1).groups[0], devices=devices).scope():
            model = keras.Sequential(
                [
                    *(keras.layers.Input((3,)), keras.layers.Dense(4, activity_regularizer="l2"), Added()),
                    *(keras.layers.BatchNormalization(synchronized=True), Added(), keras.layers.Dense(1)),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        ended.append([*model.get_weights(), history["loss"]])
    for alone, two in zip(*ended, strict=True):
        np.testing.assert_allclose(two, alone, rtol=1e-5, atol=1e-6)
