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
from split_models import images, kinds, pair, two_pairs, words

import tfdist
from tfdist import sharding
from tfdist.strategies.divided import weight_parts

MESHES = {2: {"model": 2}, 3: {"model": 3}, 4: {"data": 2, "model": 2}}
layers = keras.layers


def strategy(**arguments):
    return tfdist.AllReduceStrategy(**{"devices": ["CPU:0"], "mesh": tfdist.Mesh(**MESHES[size]), **arguments})


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
