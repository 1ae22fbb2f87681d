"""Batches that micro-batches divide, and others."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.pipeline.batch_sizes import check

ROWS = np.zeros([64, 3])


@pytest.mark.parametrize(
    ("x", "batch_size", "data"),
    [
        (ROWS, None, 2),
        ([ROWS, ROWS], 12, 1),
        (ROWS[:5], None, 1),  # one batch, which is not full
        (tf.data.Dataset.from_tensor_slices(ROWS).batch(7), None, 1),  # of a size that is not known
        (tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).batch(8, drop_remainder=True), None, 2),
        (iter([(ROWS, ROWS)]), None, 1),
    ],
)
def test_divisible_and_unknown_batch_sizes_are_accepted(x, batch_size, data):
    check(x, batch_size, 4, data)


@pytest.mark.parametrize(
    ("x", "batch_size", "micro_batches", "data", "message"),
    [
        (ROWS, None, 5, 1, r"batches of 32 .* Batches of 30 and 35 .* micro_batches=1 or 2 or 4 or 8 or 16 or 32\."),
        ({"a": ROWS}, 6, 2, 2, r"2 micro-batches .* in each of data=2 .* of 4 and 8 .* with micro_batches=1 or 3\."),
        (ROWS, 3, 2, 2, r"Batches of 4 samples do\.$"),
        (tf.data.Dataset.from_tensor_slices(ROWS).batch(7, drop_remainder=True), None, 2, 1, "batches of 7"),
    ],
)
def test_indivisible_batch_size_raises_and_names_alternatives(x, batch_size, micro_batches, data, message):
    with pytest.raises(ValueError, match=message):
        check(x, batch_size, micro_batches, data)
