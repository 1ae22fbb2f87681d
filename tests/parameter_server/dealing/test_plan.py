"""The batches of an epoch and their order, which is equal on every worker."""

import numpy as np

from tfdist.parameter_server.dealing.plan import Plan, order


def test_last_partial_batch_counts():
    assert [Plan(samples, 4, None).batches for samples in (1, 4, 5, None)] == [1, 1, 2, None]


def test_stream_has_an_empty_order():
    assert order(Plan(None, 1, 3), (0, 0)).size == 0


def test_orders_are_permutations_which_differ_by_epoch_and_seed():
    plan = Plan(1000, 32, 5)
    orders = [order(plan, (0, 0)), order(plan, (0, 1)), order(plan, (1, 0)), order(Plan(1000, 32, 6), (0, 0))]
    orders.append(order(Plan(1000, 32, 5 + 2**32), (0, 0)))
    for permutation in orders:
        assert permutation.dtype == np.int64
        np.testing.assert_array_equal(np.sort(permutation), np.arange(1000))
    assert len({permutation.tobytes() for permutation in orders}) == len(orders)
    np.testing.assert_array_equal(order(plan, (0, 0)), orders[0])
    np.testing.assert_array_equal(order(Plan(5, 2, None), (3, 3)), range(5))


def test_an_order_is_the_same_in_every_version():
    """Workers compute it on their own; those with another version of tfdist or NumPy would train on other samples."""
    np.testing.assert_array_equal(order(Plan(8, 2, 1), (0, 3)), [0, 3, 7, 1, 6, 4, 2, 5])


def test_shuffling_within_batches_keeps_samples_in_their_batch():
    plan = Plan(10, 4, 3, within_batches=True)
    places = order(plan, (0, 1))
    for start in (0, 4, 8):
        np.testing.assert_array_equal(np.sort(places[start : start + 4]), np.arange(10)[start : start + 4])
    assert places.tolist() != list(range(10))
    assert places.tolist() != order(plan, (0, 2)).tolist()
