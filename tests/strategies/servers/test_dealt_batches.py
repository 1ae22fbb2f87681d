"""Datasets of the batches that tickets are for."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.servers.dealt_batches import components, dataset, pack_components
from tfdist.strategies.servers.random_access import source_of

ROWS = 10


def numbers():
    return np.arange(ROWS, dtype="float32")


def test_tickets_come_with_their_batches():
    source = source_of(numbers(), batch_size=5)
    made = dataset(source, lambda: iter([(2**60, np.arange(5)), (7, np.arange(5, 10))]), with_tickets=True)
    assert made.element_spec == (tf.TensorSpec([], tf.int64), tf.TensorSpec([5], tf.float32))
    assert [(int(ticket), float(batch[0])) for ticket, batch in made] == [(2**60, 0), (7, 5)]


def test_each_iteration_has_tickets_of_its_own_and_closes_them():
    source = source_of(numbers(), batch_size=1)
    closed = []

    def tickets():
        place = len(opened)
        opened.append(place)
        try:
            for row in range(5):
                yield row, [row]
        finally:
            closed.append(place)

    opened = []
    made = dataset(source, tickets)
    first = iter(made)
    assert not opened, "nothing is taken before a batch is asked for"
    assert next(first).numpy() == [0]
    second = iter(made)
    assert [float(batch[0]) for batch in second] == [0, 1, 2, 3, 4]
    assert next(first).numpy() == [1]
    assert (opened, closed) == ([0, 1], [1])
    del first
    assert closed == [1, 0]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_no_more_batches_are_made_ahead_than_wanted(prefetch):
    source = source_of(numbers(), batch_size=1)
    taken = 0

    def tickets():
        nonlocal taken
        for step in range(200):
            taken += 1
            yield step, [step % ROWS]

    for used, _ in enumerate(dataset(source, tickets, prefetch=prefetch)):
        assert taken <= used + 1 + prefetch
    assert taken == 200


def test_error_in_tickets_ends_the_iteration():
    def tickets():
        yield 0, [0]
        raise RuntimeError("the server is gone")

    batches = iter(dataset(source_of(numbers(), batch_size=1), tickets))
    next(batches)
    with pytest.raises(tf.errors.OpError, match="the server is gone"):
        next(batches)


@pytest.mark.parametrize(
    "part",
    [tf.constant([1, 2]), tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[0, 1]])],
    ids=["dense", "ragged", "sparse"],
)
def test_parts_consist_of_tensors(part):
    spec = tf.type_spec_from_value(part)
    tensors = tf.nest.flatten(part, expand_composites=True)
    assert len(tensors) == len(components(spec))
    again = pack_components(spec, tensors)
    assert type(again) is type(part)
    for tensor, other in zip(tf.nest.flatten(again, expand_composites=True), tensors, strict=True):
        np.testing.assert_array_equal(tensor, other)
