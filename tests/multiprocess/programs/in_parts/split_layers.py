"""`AllReduceStrategy(mesh=…)` with split layers against plain Keras; a check for each name in TEST_CASES.

On two processes all layers are split over both; on four, over two pairs, whose parts are copies.
"""

import as_plain
import keras
import pytest
import tensorflow as tf
from as_plain import IMAGES, TOKENS, X, Y, accumulated, assert_as_plain, averages, compiled, rank, scaled, size
from checking import run_checks
from comparing import assert_close

import tfdist
from tfdist import sharding
from tfdist.layers import ColumnParallelDense, ParallelEmbedding, RowParallelDense
from tfdist.strategies.divided import weight_parts

MESHES = {2: {"model": 2}, 3: {"model": 3}, 4: {"data": 2, "model": 2}}
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


def strategy(**arguments):
    return tfdist.AllReduceStrategy(**{"devices": ["CPU:0"], "mesh": tfdist.Mesh(**MESHES[size]), **arguments})


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


def images():
    """Data-parallel convolutions, and split dense layers."""
    of = kinds()
    inputs = keras.Input((6, 6, 3))
    hidden = layers.Conv2D(4, 3, activation="relu")(inputs)
    hidden = layers.BatchNormalization(synchronized=of is Split)(hidden)
    return keras.Model(inputs, of.rows(2)(of.columns(12, "relu")(layers.Flatten()(hidden))))


def words():
    """An embedding that is read elsewhere, too, and masks within a pair."""
    of = kinds()
    inputs = keras.Input((6,), dtype="int64")
    embedding = of.embedding(12, 6, mask_zero=True, embeddings_regularizer="l2")
    hidden = of.columns(12, "tanh", gather_output=False)(embedding(inputs))
    hidden = layers.LSTM(6)(of.rows(6, input_is_parallel=True)(hidden))
    return keras.Model(inputs, layers.Dense(2)(Tied(embedding)(hidden)))


class Tied(layers.Layer):
    """Multiplies by the weight of an embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, x):
        return tf.matmul(x, self.embedding.embeddings, transpose_b=True)


class Twice(as_plain.Penalized):
    """Calls a layer twice."""

    def __init__(self):
        super().__init__()
        of = kinds()
        self.first, self.again, self.out = of.columns(6, "tanh"), of.rows(6, "tanh"), layers.Dense(2)

    def call(self, x):
        return self.out(self.again(self.again(self.first(x))))


def models():
    made = strategy()
    for make, x in ((pair, X), (images, IMAGES), (words, TOKENS)):
        assert_as_plain(make, x, made)


def axes():
    """Layers of one model are split over different axes of a mesh."""
    made = strategy(mesh=tfdist.Mesh(rows=2, columns=2))
    assert_as_plain(two_pairs, X, made, averages)


def groups():
    """The processes along an axis are a group."""
    mesh = tfdist.Mesh(**MESHES[size])
    for axis in mesh.axes:
        total = tfdist.all_reduce(tf.constant(2**rank), "sum", mesh.group(axis))
        assert total == sum(2**other for other in mesh.along(axis, rank)), axis


def second_order():
    assert_as_plain(Twice, X, strategy())


def optimizers():
    made = strategy()
    assert_as_plain(pair, X, made, averages)
    assert_as_plain(pair, X, made, scaled)


def accumulation():
    assert_as_plain(pair, X, strategy(), accumulated, 3)


def few():
    """Batches with fewer rows than processes."""
    model, plain = compiled(pair, made=strategy()), compiled(pair)
    for each in (model, plain):
        each.fit(X[:4], Y[:4], batch_size=1, shuffle=False, verbose=0)
    assert_close(model, plain.get_weights())


def sharded():
    """Other weights are divided among all processes, too, however small they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "SPLIT_BYTES", 0)
        for how in ({"shard": "optimizer"}, {"shard": "weights"}, {"shard": "weights", "gather": "model"}):
            model = assert_as_plain(images, IMAGES, strategy(**how), averages)
            in_parts = [weight_parts.of(weight) is not None for weight in model.trainable_weights]
            assert all(in_parts) is (size == 2 and how["shard"] == "weights"), in_parts


def ways():
    as_plain.assert_as_plain_in_all_ways(strategy, pair)


def loops():
    as_plain.assert_as_plain_in_loops(strategy, pair)


def files():
    """A `.keras` file has split layers."""
    as_plain.assert_files_as_plain(strategy, pair)


def restarted():
    as_plain.assert_restarts_as_plain(strategy, pair)


def refused():
    with pytest.raises(ValueError, match=r"AllReduceStrategy: mesh=Mesh\(.*\) does not work with delay=1"):
        strategy(delay=1)
    with pytest.raises(TypeError, match=r"AllReduceStrategy\(mesh=…\) must be a tfdist.Mesh, .*; got 2"):
        strategy(mesh=2)
    with pytest.raises(ValueError, match=rf"is for 5 processes \(model=5\), and {size} train together"):
        strategy(mesh=tfdist.Mesh(model=5))
    with tfdist.AllReduceStrategy(devices=["CPU:0"]).scope(), pytest.raises(ValueError, match="strategy in use has no"):
        pair()


def alone():
    as_plain.call_alone(strategy, pair, lambda model: model(X[:2]))


def endless():
    as_plain.train_endlessly(strategy, pair)


run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
