"""Parts of batches: every sample is in one of them, in order."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.private.keras import backend


@functools.cache
def divided(count, samples):
    """A function that divides a batch of so many samples, or of any number for None, and joins its parts."""

    def run(x, y):
        batch = {"x": x, "y": (y, None)}
        parts = MicroBatches(batch, count)
        micro_batches = [parts.part(batch, number) for number in range(count)]
        return (
            parts.joined(micro_batches)["x"],
            [part["x"] for part in micro_batches],
            parts.rows,
            [parts.weight(n) for n in range(count)],
        )

    specs = [tf.TensorSpec([samples, 2], tf.float32), tf.TensorSpec([samples], tf.int32)]
    return tf.function(run, input_signature=specs)


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("is_known", [True, False])
def test_every_sample_is_in_one_part(samples, count, is_known):
    x, y = tf.reshape(tf.range(2.0 * samples), [samples, 2]), tf.range(samples)
    joined, parts, rows, weights = divided(count, samples if is_known else None)(x, y)
    np.testing.assert_array_equal(joined, x)
    assert [int(tensor) for tensor in rows] == [
        (number + 1) * samples // count - number * samples // count for number in range(count)
    ]
    assert all(part.shape[0] == max(1, int(row_count)) for part, row_count in zip(parts, rows, strict=True)), (
        "no kernel without rows"
    )
    np.testing.assert_allclose(weights, [int(row_count) / samples for row_count in rows])


def test_masks_are_joined():
    parts = MicroBatches(tf.zeros([5]), 2)
    made = []
    for rows in (2, 3):
        tensor = tf.fill([rows, 4], float(rows))
        backend.set_keras_mask(tensor, tf.fill([rows, 4], rows == 2))
        made.append(tensor)
    mask = backend.get_keras_mask(parts.joined(made))
    np.testing.assert_array_equal(mask, [[True] * 4] * 2 + [[False] * 4] * 3)


def test_sparse_and_ragged_batches():
    dense = np.arange(12.0).reshape(4, 3) % 5
    sparse, ragged = tf.sparse.from_dense(dense), tf.RaggedTensor.from_tensor(dense, padding=0.0)
    parts = MicroBatches((sparse, ragged), 2)
    sparse_part, ragged_part = parts.part((sparse, ragged), 1)
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse_part), dense[2:])
    assert ragged_part.to_list() == ragged.to_list()[2:]
