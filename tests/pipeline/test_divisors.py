"""Divisors of whole batches; that losses of micro-batches use them is in `test_strategy`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline.divisors import divisors_of
from tfdist.pipeline.stages import Stages
from tfdist.strategies.keras import keras_seams

keras_seams.install()

X = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 1, 1, 1]])
Y = np.array([[0, 1, 1, 0], [1, 1, 0, 0], [0, 1, 0, 1]])
WEIGHTS = np.array([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])


def stages_of(*hidden):
    inputs = keras.Input((4,), dtype="int32")
    embedded = layers.Embedding(5, 3, mask_zero=True)(inputs)
    for layer in hidden:
        embedded = layer(embedded)
    calls = ModelCalls(keras.Model(inputs, layers.Dense(2)(embedded)))
    return Stages(calls, [1, len(calls.calls)])


def divisors(loss, stages=None, eager=True):
    stages = stages or stages_of()

    def compute(x, y, weights):
        def loss_of(data, outputs):
            return loss(data[1], outputs[0], sample_weight=data[2])

        return divisors_of(stages, (x, y, weights), [x], loss_of)

    given = tf.constant(X), tf.constant(Y), tf.constant(WEIGHTS)
    return [float(divisor) for divisor in (compute if eager else tf.function(compute, autograph=False))(*given)]


@pytest.mark.parametrize("eager", [True, False])
def test_divisor_counts_unmasked_steps_or_sums_weights(eager):
    crossentropy = keras.losses.SparseCategoricalCrossentropy
    assert divisors(crossentropy(from_logits=True), eager=eager) == [7.0]
    assert divisors(crossentropy(from_logits=True, reduction="sum"), eager=eager) == []
    by_weights = crossentropy(from_logits=True, reduction="mean_with_sample_weight")
    assert divisors(by_weights, eager=eager) == [1.0 + 2 + 5 + 9 + 10 + 11 + 12]
    assert divisors(crossentropy(from_logits=True, ignore_class=0), eager=eager) == [4.0]


def test_layers_after_the_mask_do_not_change_divisor():
    stages = stages_of(layers.LSTM(3, return_sequences=True), layers.Dropout(0.5), layers.Bidirectional(layers.GRU(
        2, return_sequences=True
    )))  # fmt: skip
    assert divisors(keras.losses.SparseCategoricalCrossentropy(from_logits=True), stages) == [7.0]


class Masking(layers.Layer):
    """Masks by what is computed of weights."""

    supports_masking = True

    def call(self, inputs):
        return 2 * inputs

    def compute_mask(self, inputs, previous_mask=None):
        return keras.ops.sum(inputs, -1) > 0


def test_mask_computed_from_weights_raises():
    with pytest.raises(ValueError, match=r'depends on weights.*Use schedule="gpipe"'):
        divisors(keras.losses.SparseCategoricalCrossentropy(from_logits=True), stages_of(Masking()))
