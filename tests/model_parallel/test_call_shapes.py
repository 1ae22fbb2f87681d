"""The shapes of a model's tensors."""

import keras
from keras import layers, ops

from tfdist.model_parallel.call_shapes import shapes_of
from tfdist.model_parallel.model_calls import ModelCalls


class Patches(layers.Layer):
    """Keras cannot tell the number of patches."""

    def call(self, x):
        return ops.reshape(x, (ops.shape(x)[0], -1, 4))


def shapes(inputs, outputs, **kwargs):
    calls = ModelCalls(keras.Model(inputs, outputs))
    tensor_shapes = shapes_of(calls, 5, **kwargs)
    return [tensor_shapes[key].as_list() for call in calls.calls for key in call.outputs]


def test_known_shapes():
    inputs = keras.Input((8,))
    assert shapes(inputs, layers.Dense(3)(layers.Dense(2)(inputs))) == [[5, 2], [5, 3]]


def test_shapes_unknown_to_keras_are_inferred_from_inputs():
    inputs = keras.Input((6, 8))
    patches = Patches()(inputs)
    assert patches.shape == (None, None, 4)
    assert shapes(inputs, layers.Dense(3)(patches)) == [[5, 12, 4], [5, 12, 3]]


def test_open_size_replaces_unknown_lengths():
    inputs = keras.Input((None, 2))
    outputs = layers.Dense(4)(layers.LSTM(3, return_sequences=True)(inputs))
    assert shapes(inputs, outputs) == [[5, None, 3], [5, None, 4]]
    assert shapes(inputs, outputs, open_size=7) == [[5, 7, 3], [5, 7, 4]]
