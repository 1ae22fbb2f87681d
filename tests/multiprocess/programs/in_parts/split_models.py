"""Models with split layers; the same ones with the layers of Keras, outside of a strategy's scope."""

import keras
import tensorflow as tf

from tfdist.layers import ColumnParallelDense, ParallelEmbedding, RowParallelDense

layers = keras.layers


class Plain:
    """Layers of Keras."""

    @staticmethod
    def columns(units, activation=None, gather_output=True, mesh_axis="model", **how):
        return layers.Dense(units, activation, **how)

    @staticmethod
    def rows(units, activation=None, input_is_parallel=False, mesh_axis="model", **how):
        return layers.Dense(units, activation, **how)

    embedding = layers.Embedding


class Split:
    """The same layers, split."""

    columns, rows, embedding = ColumnParallelDense, RowParallelDense, ParallelEmbedding


def kinds():
    """Layers for the scope of a strategy, or for plain Keras."""
    return Split if tf.distribute.has_strategy() else Plain


def pair():
    """Between the layers of the pair, units stay on their processes."""
    of = kinds()
    return keras.Sequential(
        [
            layers.Input((7,)),
            of.columns(12, "tanh", gather_output=False, kernel_regularizer="l2"),
            layers.Activation("gelu"),
            of.rows(6, "tanh", input_is_parallel=True),
            of.columns(6, "softmax"),
            of.rows(2),
        ]
    )


def two_pairs():
    """Each over an axis of its own, and a layer over each."""
    of = kinds()
    return keras.Sequential(
        [
            layers.Input((7,)),
            of.columns(12, "tanh", gather_output=False, mesh_axis="rows"),
            of.rows(6, "tanh", input_is_parallel=True, mesh_axis="rows"),
            of.columns(12, "tanh", gather_output=False, mesh_axis="columns"),
            of.rows(6, "tanh", input_is_parallel=True, mesh_axis="columns"),
            of.columns(4, "softmax", mesh_axis="rows"),
            of.rows(2, mesh_axis="columns"),
        ]
    )


def images(normalized=True):
    """Data-parallel convolutions, and split dense layers."""
    of = kinds()
    inputs = keras.Input((6, 6, 3))
    hidden = layers.Conv2D(4, 3, activation="relu")(inputs)
    if normalized:
        hidden = layers.BatchNormalization(synchronized=of is Split)(hidden)
    return keras.Model(inputs, of.rows(2)(of.columns(12, "relu")(layers.Flatten()(hidden))))


def words():
    """An embedding that is read elsewhere, too, and masks within a pair."""
    of = kinds()
    inputs = keras.Input((6,), dtype="int64")
    embedding = of.embedding(12, 6, mask_zero=True, embeddings_regularizer="l2")
    hidden = of.columns(12, "tanh", gather_output=False)(embedding(inputs))
    hidden = layers.SimpleRNN(6)(of.rows(6, input_is_parallel=True)(hidden))
    return keras.Model(inputs, layers.Dense(2)(Tied(embedding)(hidden)))


class Tied(layers.Layer):
    """Multiplies by the weight of an embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, x):
        return tf.matmul(x, self.embedding.embeddings, transpose_b=True)
