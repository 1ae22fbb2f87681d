"""Private members of what Keras reads batches with, on what it reads batches with."""

import keras
import numpy as np
import tensorflow as tf

from tfdist.private import epochs
from tfdist.private.keras import data_adapters, tf_trainer

X = np.arange(8, dtype=np.float32).reshape(4, 2)


def iterator_of(x, **options):
    return tf_trainer.TFEpochIterator(x=x, distribute_strategy=tf.distribute.get_strategy(), **options)


def test_spec_of_iterator_has_dtypes_of_batches():
    spec = epochs.spec_of(iterator_of(X, y=X[:, :1], batch_size=2))
    assert [tensor_spec.dtype for tensor_spec in tf.nest.flatten(spec)] == [tf.float32] * 2


def test_untuned_iterators_read_the_same_batches():
    iterator = iterator_of(X, batch_size=2)
    epochs.untune(iterator)
    assert iterator._distributed_dataset.options().autotune.enabled is False
    assert [float(next(batches)[0, 0]) for *_, batches in iterator] == [0.0, 4.0]


def test_end_epoch_restarts_the_data():
    iterator = iterator_of(X, batch_size=1, steps_per_epoch=2)
    seen = []
    for _ in range(2):
        for *_, batches in iterator:  # Keras 3.10 has fewer parts
            seen.append(float(next(batches)[0, 0]))
        epochs.end_epoch(iterator)
    assert seen == [0.0, 2.0] * 2


def test_arrays_of_adapter_equal_given_arrays():
    adapter = data_adapters.ArrayDataAdapter(X, batch_size=2)
    np.testing.assert_array_equal(epochs.arrays_of(adapter), X)


def test_batches_of_a_py_dataset_are_standardized():
    class Batches(keras.utils.PyDataset):
        num_batches = 2

        def __getitem__(self, number):
            return [X[number], X[number]]

    adapter = data_adapters.PyDatasetAdapter(Batches(), class_weight=None)
    batch = epochs.standardized(adapter, (X, X[:, 0]))
    np.testing.assert_array_equal(batch[0], X)
