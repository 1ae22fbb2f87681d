"""Batches of data that are read in order travel as they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.servers.test_random_access import assert_equal
from tfdist.private.keras import tree
from tfdist.strategies.servers.chief_stream import ChiefStream, stream_of


def streamed(x, y=None, sample_weight=None, batch_size=None, class_weight=None, steps=None):
    made = stream_of(x, y, sample_weight, batch_size, False, class_weight, steps)
    assert isinstance(made, ChiefStream), made
    return made


def received(source, epochs=1):
    """The batches of each epoch, as a worker makes them."""
    return [
        [source.assembled([tf.constant(part) for part in source.parts(parts)]) for parts in source.stream()]
        for _ in range(epochs)
    ]


def numbers(*shape, dtype="float32"):
    return np.arange(np.prod((10, *shape)), dtype=dtype).reshape(10, *shape)


DATASETS = {
    "pairs": lambda: (numbers(2), numbers()),
    "dictionary": lambda: ({"a": numbers(2), "b": numbers(dtype="int64")}, numbers(1), numbers()),
    "strings": lambda: np.array(["a", "é\0", ""] * 3 + ["d"]),
    "bfloat16": lambda: tf.cast(numbers(), tf.bfloat16),
    "booleans and complex": lambda: (numbers() > 3, tf.complex(numbers(), numbers())),
    "ragged": lambda: (tf.RaggedTensor.from_row_lengths(tf.range(20), [2] * 10), numbers()),
    "sparse": lambda: (tf.sparse.from_dense(np.eye(10)), numbers()),
}


@pytest.mark.parametrize("name", DATASETS)
def test_batches_of_a_dataset_arrive_as_they_are(name):
    data = tf.data.Dataset.from_tensor_slices(DATASETS[name]()).batch(4)
    source = streamed(data)
    assert source.batches == 3
    for epoch in received(source, epochs=2):
        for batch, expected in zip(epoch, data, strict=True):
            assert_equal(batch, expected)


def test_missing_parts_of_generator_batches_stay_none():
    def batches():
        for start in (0, 5):
            yield numbers()[start : start + 5], None, numbers()[start : start + 5]

    source = streamed(batches())
    assert source.batches is None
    (epoch,) = received(source)
    assert [batch[1] for batch in epoch] == [None, None]
    np.testing.assert_array_equal(np.concatenate([batch[2] for batch in epoch]), numbers())
    assert source.first()[1] is None


def test_class_weights_are_sample_weights():
    data = tf.data.Dataset.from_tensor_slices((numbers(2), numbers() % 2)).batch(5)
    (epoch,) = received(streamed(data, class_weight={0: 2.0, 1: 3.0}))
    np.testing.assert_array_equal(epoch[0][2], [2, 3, 2, 3, 2])


@pytest.mark.parametrize(("steps", "expected"), [(2, [[0, 1], [2, 3], [4, 0]]), (5, [[0, 1, 2, 3, 4]] * 3)])
def test_steps_go_on_where_the_last_epoch_has_ended(steps, expected):
    data = tf.data.Dataset.range(5).batch(1)
    repeated = data.repeat() if steps == 2 else data
    epochs = received(streamed(repeated, steps=steps), epochs=3)
    assert [[int(batch[0]) for batch in epoch] for epoch in epochs] == expected


def test_data_ending_within_an_epoch_logs_warning(caplog):
    epochs = received(streamed(tf.data.Dataset.range(3).batch(1), steps=2), epochs=2)
    assert [len(epoch) for epoch in epochs] == [2, 1]
    assert "the data ended before the epoch's steps_per_epoch steps" in caplog.text


def test_hooks_of_epochs_are_called_where_the_data_are_read():
    class Hooked(keras.utils.PyDataset):
        begun = ended = 0

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return numbers(2), numbers() + index

        def on_epoch_begin(self):
            self.begun += 1

        def on_epoch_end(self):
            self.ended += 1

    data = Hooked()
    source = streamed(data)
    epochs = received(source, epochs=2)
    assert [[int(batch[1][0]) for batch in epoch] for epoch in epochs] == [[0, 1]] * 2
    assert data.ended == 2


def test_other_parts_than_the_chiefs_are_an_error():
    chief = streamed(tf.data.Dataset.from_tensor_slices((numbers(), numbers())).batch(5))
    worker = streamed(tf.data.Dataset.from_tensor_slices(numbers()).batch(5))
    with pytest.raises(ValueError, match="has 2 parts, and those of this worker have 1: give `fit` data of the same"):
        worker.parts(next(chief.stream()))


def test_another_dtype_than_the_chiefs_is_an_error():
    chief = streamed(tf.data.Dataset.from_tensor_slices(numbers()).batch(5))
    worker = streamed(tf.data.Dataset.from_tensor_slices(numbers(dtype="int32")).batch(5))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"[Tt]ype mismatch"):
        worker.assembled([tf.constant(part) for part in worker.parts(next(chief.stream()))])


def test_a_batch_has_the_shape_of_its_type():
    source = streamed(tf.data.Dataset.from_tensor_slices(numbers(3)).batch(5, drop_remainder=True))
    assert tree.flatten(source.first())[0].shape == (5, 3)
    assert source.plan(7).samples is None


def test_nested_datasets_cannot_be_streamed():
    data = tf.data.Dataset.from_tensor_slices(numbers()).window(2)
    assert "cannot be sent" in stream_of(data, None, None, None, False, None, None)
