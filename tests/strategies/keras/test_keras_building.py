import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.keras import keras_building


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (tf.TensorSpec([None, 3], tf.float16), (4, 3)),
        (tf.TensorSpec([7, 3], tf.int64), (4, 3)),
        (tf.TensorSpec([None]), (4,)),
        (tf.TensorSpec([], tf.bool), ()),
        (tf.TensorSpec([None], tf.string), (4,)),
        (tf.SparseTensorSpec([None, 3]), (4, 3)),
        (tf.TensorSpec([None, None]), (4, None)),
        (tf.RaggedTensorSpec([None, None, 2]), (4, None, 2)),
        (tf.TensorSpec(None), None),
    ],
)
def test_some_rows_match_the_dataset_spec(spec, shape):
    """As far as its spec tells what they are like."""
    rows = keras_building._some_rows(spec, 4, None)
    if shape is None:
        assert rows is None
    else:
        assert (rows.shape, rows.dtype) == (shape, spec.dtype.name)
        assert None not in keras_building._some_rows(spec, 4, 1).shape


@pytest.mark.parametrize("length", [3, None])
def test_models_are_built_without_drawing_a_batch(strategy, length):
    """The dataset's spec gives the shapes. A batch drawn to build the model would not be trained on."""
    drawn = []

    def batches():
        for number in range(3):
            drawn.append(number)
            yield np.full((2, length or number + 1, 2), number, np.float32), np.ones((2, 1), np.float32)

    spec = tf.TensorSpec([None, length, 2]), tf.TensorSpec([None, 1])
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    with strategy.scope():
        model = keras.Sequential([keras.layers.SimpleRNN(2), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(dataset, shuffle=False, verbose=0)
    assert model.built
    assert drawn == [0, 1, 2]


def test_models_whose_eager_steps_have_unknown_shapes_are_built_from_a_batch(strategy):
    spec = tf.TensorSpec([None, None]), tf.TensorSpec([None, None])
    rows = np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)
    dataset = tf.data.Dataset.from_generator(lambda: [rows] * 2, output_signature=spec)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(dataset, shuffle=False, verbose=0)
    assert model.layers[0].kernel.shape == (3, 1)


def test_a_model_with_steps_of_its_own_need_not_be_callable(strategy):
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def train_step(self, data):
            return {"loss": tf.reduce_mean(self.inner(data["x"]))}

    with strategy.scope():
        model = Pair()
        model.compile("sgd")
    model.fit(tf.data.Dataset.from_tensor_slices({"x": tf.ones([4, 2])}).batch(2), shuffle=False, verbose=0)
    assert model.inner.kernel.shape == (2, 1)
