"""Maps between the rows of processes and parts of their features; `tests/model_parallel` has layers on them."""

import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import BOTH_WAYS
from tests.strategies.ranked import Ranked, in_step
from tfdist.sharding import Ownership
from tfdist.strategies.divided.split_axis import Split, SplitAxis

ROWS = (2, 1, 3)


def axis_of(group):
    """An axis along all processes."""
    return SplitAxis("model", group, group, group.subgroup((group.rank,)), range(group.size))


def part(rank):
    return tf.constant(np.random.default_rng(rank).normal(size=(ROWS[rank], 6)))


@BOTH_WAYS
@pytest.mark.parametrize("way", ["by rows", "by features"])
def test_what_enters_and_leaves_is_the_same_and_so_is_its_gradient(ranks, size, call, way):
    """Also the gradient of the gradient."""

    def work(group):
        axis = axis_of(group)

        def there_and_back(rows):
            if way == "by rows":
                there, counts = axis.enter(rows)
                return axis.leave_summed(there**3 / group.size, counts)
            there, counts = axis.enter_by_features(rows)
            return axis.leave(there**3, counts)

        def derivatives(rows):
            with tf.GradientTape() as outer:
                outer.watch(rows)
                with tf.GradientTape() as inner:
                    inner.watch(rows)
                    result = there_and_back(rows)
                first = inner.gradient(result, rows)
            return result, first, outer.gradient(first, rows)

        return call(derivatives, part(group.rank))

    for rank, (result, first, second) in enumerate(ranks(size)(work)):
        given = part(rank).numpy()
        np.testing.assert_allclose(result, given**3)
        np.testing.assert_allclose(first, 3 * given**2)
        np.testing.assert_allclose(second, 6 * given)


def test_gradients_count_by_the_samples_of_each_process(ranks):
    """In Keras's steps: what rank 0's loss sends back to features counts by rank 0's samples, wherever they are."""

    def work(group):
        strategy = Ranked(group)
        axis = axis_of(group)

        def step(rows):
            with tf.GradientTape() as tape:
                tape.watch(rows)
                there, counts = axis.enter(rows)
                with tf.GradientTape() as of_features:
                    of_features.watch(there)
                    loss = tf.reduce_sum(axis.leave_summed(there, counts))
            return tape.gradient(loss, rows), of_features.gradient(loss, there)

        return in_step(strategy, ROWS[group.rank], 3, step, part(group.rank))

    for rank, (of_rows, of_features) in enumerate(ranks(2)(work)):
        np.testing.assert_allclose(of_features, np.repeat([2 / 3, 2 / 3, 1 / 3], 6).reshape(3, 6))
        share = ROWS[rank] / 3
        np.testing.assert_allclose(of_rows, np.full((ROWS[rank], 6), 2 * (2 / 3 if rank == 0 else 1 / 3) / share))


def test_weights_are_cut_evenly():
    class Alone:
        size, rank, members = 2, 0, (0, 1)

    axis = SplitAxis("model", Alone(), Alone(), Alone(), (0, 1, 0, 1))
    assert axis.owner((3, 8), Split("model", 1, "Dense d", "units")) == Ownership(None, (0, 4, 8), 1, (0, 1, 0, 1))
    with pytest.raises(ValueError, match=r"Dense d: 5 units do not divide over the 2 processes .*; 4 or 6 would"):
        axis.owner((3, 5), Split("model", 1, "Dense d", "units"))
    with pytest.raises(ValueError, match="; 2 would"):
        axis.owner((1, 5), Split("model", 0, "Dense d", "units"))


@BOTH_WAYS
def test_counts_are_kept_for_the_next_layer(ranks, size, call):
    def work(group):
        axis = axis_of(group)

        def layers(rows):
            there, counts = axis.enter(rows)
            axis.note(counts)
            mask = axis.rows_of_all(rows[:, 0] > 0, counts)
            return axis.leave_summed(there, axis.noted("d")), axis.own_rows(mask, axis.noted("d"))

        return call(layers, part(group.rank))

    for rank, (rows, mask) in enumerate(ranks(size)(work)):
        np.testing.assert_allclose(rows, part(rank) * size)
        np.testing.assert_array_equal(mask, part(rank)[:, 0] > 0)


def test_without_counts_there_is_an_error(ranks):
    def work(group):
        with pytest.raises(ValueError, match="d: input_is_parallel=True needs the features of a layer with gather_ou"):
            axis_of(group).noted("d")

    ranks(1)(work)
