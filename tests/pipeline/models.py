"""Models that pipelines are tried with, their data, and what is expected of them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.pipeline.objective import Objective
from tfdist.pipeline.stages import Stages

SAMPLES = 12


def perceptron():
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(5, "tanh") for _ in range(5)), layers.Dense(2)])


def skips():
    """Connections over several stages, a model inside, what no gradient comes back for."""
    inputs = keras.Input((6,))
    first = layers.Dense(6, "relu")(inputs)
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.LayerNormalization()])
    second = layers.Add()([inner(first), first])
    third = layers.Concatenate()([layers.Dense(3)(second), inputs, keras.ops.sign(first)])
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([layers.Dense(6)(third), first])))


def shared():
    inputs = [keras.Input((6,)), keras.Input((6,))]
    dense = layers.Dense(6, "tanh")
    first, second = dense(inputs[0]), layers.Dense(6)(inputs[1])
    return keras.Model(inputs, layers.Dense(2)(dense(layers.Dense(6)(layers.Add()([dense(second), first])))))


def several_outputs():
    inputs = keras.Input((6,))
    early = layers.Dense(2, name="early")(inputs)
    hidden = layers.Dense(5, "relu")(layers.Dense(5, "relu")(inputs))
    return keras.Model(inputs, [early, layers.Dense(3, name="late")(hidden)])


def words():
    """Sparse gradients, masks that cross stages, a loop."""
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(9, 4, mask_zero=True)(inputs)
    encoded = layers.SimpleRNN(3, return_sequences=True)(embedded)
    pooled = layers.GlobalAveragePooling1D()(layers.Dropout(0.0)(encoded))  # which takes the mask
    return keras.Model(inputs, layers.Dense(2)(pooled))


def words_again():
    """An embedding that an early and a late stage look words up in."""
    inputs = keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(9, 4)
    hidden = layers.Dense(4)(layers.Dense(4, "tanh")(layers.GlobalAveragePooling1D()(embedding(inputs))))
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([hidden, embedding(keras.ops.argmax(hidden, -1))])))


def adding_losses():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.1)),
            layers.ActivityRegularization(0.2),
            layers.Dense(5),
            layers.Dense(2, activity_regularizer="l1"),
        ]
    )


class Tied(layers.Layer):
    """Multiplies by the kernel of another layer."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def call(self, inputs):
        return keras.ops.matmul(inputs, keras.ops.transpose(self.other.kernel))


def tied():
    """Layers with one weight, which costs something, in one stage or in two."""
    inputs = keras.Input((6,))
    dense = layers.Dense(6, kernel_regularizer="l2")
    hidden = Tied(dense)(dense(inputs))
    return keras.Model(inputs, layers.Dense(2)(Tied(dense)(layers.Dense(6, "tanh")(hidden))))


def words_inside():
    """A mask that comes into a model from around it, and leaves it across a cut."""
    inputs = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(9, 4, mask_zero=True)(inputs)
    inner = keras.Sequential([keras.Input((5, 4)), layers.Activation("tanh"), layers.Dropout(0.0), layers.SimpleRNN(3)])
    return keras.Model(inputs, layers.Dense(2)(inner(embedded)))


MODELS = {
    builder.__name__: builder
    for builder in (perceptron, skips, shared, several_outputs, words, words_inside, words_again, tied, adding_losses)
}


def data_of(model, samples=SAMPLES):
    generator = np.random.default_rng(0)
    shapes = [(samples, *tensor.shape[1:]) for tensor in model.inputs]
    if "int" in model.inputs[0].dtype:
        x = [tf.constant(generator.integers(0, 4, shape), tf.int32) for shape in shapes]
    else:
        x = [tf.constant(generator.normal(size=shape), tf.float32) for shape in shapes]
    return x, [tf.constant(generator.normal(size=(samples, *tensor.shape[1:])), tf.float32) for tensor in model.outputs]


def mean_squares(y, outputs):
    return tf.add_n(
        [tf.reduce_mean((tf.cast(output, tf.float32) - target) ** 2) for output, target in zip(outputs, y, strict=True)]
    )


def of_whole(model, x, y):
    """The outputs, the loss, and the gradients."""
    with tf.GradientTape() as tape:
        outputs = tf.nest.flatten(model(x if len(x) > 1 else x[0], training=True))
        loss = mean_squares(y, outputs) + sum(model.losses)
    variables = model.trainable_variables
    return (
        outputs,
        loss,
        dict(zip(map(id, variables), tape.gradient(loss, [variable.value for variable in variables]), strict=True)),
    )


def in_stages(calls, count):
    """Calls in stages of about the same number."""
    return Stages(calls, [(stage + 1) * len(calls.calls) // count for stage in range(count)])


def objective_of(model, table, parts, tensors):
    """A batch of a model's inputs and targets in micro-batches, and the objective of a pipeline of it."""
    count = len(model.inputs)
    targets = list(tensors[count:])
    batch = MicroBatches(tensors[0], parts)

    def loss(outputs, number):
        return mean_squares(targets if number is None else batch.part(targets, number), outputs)

    return batch, Objective(loss, batch, table.ends_forward_first)
