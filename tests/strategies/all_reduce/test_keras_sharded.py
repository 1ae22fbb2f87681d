"""Updates of which each process makes its own; `tests/multiprocess/test_sharded_optimizer.py` has `fit`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedShards, in_step
from tfdist.compression import OneBit, by_size
from tfdist.strategies.keras import keras_seams
from tfdist.strategies.keras.keras_assignments import copy_of

SHAPES = [(3, 2), (2,), (4, 3), (5, 2), (7, 2)]
SPARSE = 2
"""Number of the last variables, whose gradients are sparse."""
ROWS = (3, 1)


def gradients_of(rank, step):
    generator = np.random.default_rng(10 * step + rank)
    dense = [tf.constant(generator.normal(size=shape).astype("float32")) for shape in SHAPES[:-SPARSE]]
    rows = [generator.normal(size=(2, 2)).astype("float32") for _ in range(SPARSE)]
    sparse = [
        tf.IndexedSlices(tf.constant(each), tf.constant([rank, 3]), tf.constant(shape))
        for each, shape in zip(rows, SHAPES[-SPARSE:], strict=True)
    ]
    return [*dense, *sparse]


def together(step):
    """The mean of both ranks' gradients, weighted by their rows."""
    pairs = zip(*(gradients_of(rank, step) for rank in range(2)), strict=True)
    shares = [rows / sum(ROWS) for rows in ROWS]
    means = []
    for first, second in pairs:
        if isinstance(first, tf.IndexedSlices):
            values = tf.concat([first.values * shares[0], second.values * shares[1]], 0)
            means.append(tf.IndexedSlices(values, tf.concat([first.indices, second.indices], 0), first.dense_shape))
        else:
            means.append(first * shares[0] + second * shares[1])
    return means


OPTIMIZERS = {
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5, weight_decay=0.01),
    "averaged": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "factored": lambda: keras.optimizers.Adafactor(0.1),
}


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_one_process(ranks, monkeypatch, name, cuts):
    """Also of rows: each rank has two rows of the third variable or more, and of the sparse gradients."""
    if cuts:
        monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)

    def variables():
        return [keras.Variable(np.full(shape, 1.0, "float32")) for shape in SHAPES]

    def work(group):
        strategy = RankedShards(group)
        with strategy.scope():
            trained, optimizer = variables(), OPTIMIZERS[name]()
            optimizer.build(trained)
        for step in range(4):
            given = gradients_of(group.rank, step)
            in_step(strategy, ROWS[group.rank], sum(ROWS), optimizer.apply, given, trained)
        return [variable.numpy() for variable in trained]

    keras_seams.install()
    plain, optimizer = variables(), OPTIMIZERS[name]()
    optimizer.build(plain)
    for step in range(4):
        optimizer.apply(together(step), plain)
    first, second = ranks(2)(work)
    for here, there, variable in zip(first, second, plain, strict=True):
        np.testing.assert_array_equal(here, there)
        np.testing.assert_allclose(here, variable.numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("cuts", [False, True])
def test_residuals_are_found_again(ranks, monkeypatch, tmp_path, cuts):
    """In further steps, and after a restart, in which variables are other ones; without them, weights differ."""
    if cuts:
        monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)

    def work(group):
        def made(values):
            strategy = RankedShards(group, compression=by_size({0: OneBit()}))
            with strategy.scope():
                trained, optimizer = [keras.Variable(value) for value in values], keras.optimizers.SGD(0.1)
                optimizer.build(trained)
            return strategy, trained, optimizer

        def train(strategy, trained, optimizer, steps):
            for step in steps:
                in_step(strategy, 1, 2, optimizer.apply, gradients_of(group.rank, step)[:-SPARSE], trained)
            return [variable.numpy() for variable in trained]

        prefix, initial = (
            tmp_path / f"{group.number('prefix')}",
            [np.ones(shape, "float32") for shape in SHAPES[:-SPARSE]],
        )
        whole = train(*made(initial), range(5))
        first = made(initial)
        values = train(*first, range(3))
        first[0].extended.compressor.save(prefix)
        again, forgetful = made(values), made(values)
        assert again[0].extended.compressor.load(prefix)
        return whole, train(*again, range(3, 5)), train(*forgetful, range(3, 5))

    for whole, again, forgetful in ranks(2)(work):
        for expected, found, without in zip(whole, again, forgetful, strict=True):
            np.testing.assert_array_equal(found, expected)
            assert (without != expected).any()


def test_rows_of_several_embeddings_are_summed_together(ranks):
    def work(group):
        strategy, begun = RankedShards(group), []
        for count in (2, 5):
            with strategy.scope():
                trained, optimizer = [keras.Variable(np.ones((5, 2))) for _ in range(count)], keras.optimizers.SGD()
                optimizer.build(trained)
            rows = [tf.IndexedSlices(tf.ones([1, 2]), tf.constant([group.rank]), tf.constant([5, 2]))] * count
            before = group.engine.statistics.begun
            in_step(strategy, 1, 2, optimizer.apply, rows, trained)
            begun.append(group.engine.statistics.begun - before)
        return begun

    for few, many in ranks(2)(work):
        assert few == many


def test_nothing_is_summed_outside_of_the_strategy(ranks):
    """Each weight is updated by its owner with the owner's gradient, as it is."""

    def work(group):
        strategy = RankedShards(group)
        with strategy.scope():
            trained, optimizer = [keras.Variable(np.zeros(3, "float32")) for _ in range(2)], keras.optimizers.SGD(1.0)
            optimizer.build(trained)
        optimizer.apply([tf.fill([3], group.rank + 1.0)] * 2, trained)
        return sorted(float(variable.numpy()[0]) for variable in trained)

    assert ranks(2)(work) == [[-2.0, -1.0]] * 2


def address(variable):
    """Returns where a variable has its value, of TensorFlow's memory."""
    return np.asarray(memoryview(tf.convert_to_tensor(variable))).ctypes.data


@pytest.mark.parametrize("in_graph", [False, True])
def test_rows_have_no_memory_of_their_own_between_steps(ranks, monkeypatch, in_graph):
    """Rows of multiples of 64 bytes, of weights with dense and with sparse gradients."""
    monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)

    def work(group):
        strategy = RankedShards(group)
        with strategy.scope():
            trained = [keras.Variable(np.ones(shape, "float32")) for shape in ((6, 16), (8, 32))]
            optimizer = keras.optimizers.Adam()
            optimizer.build(trained)
        rows = tf.IndexedSlices(tf.ones([2, 32]), tf.constant([1, 7]), tf.constant([8, 32]))

        def apply():
            in_step(strategy, 1, 2, optimizer.apply, [tf.ones([6, 16]), rows], trained)

        step = tf.function(apply) if in_graph else apply
        distances = []
        for _ in range(3):
            step()
            dealing = strategy.extended.dealing(optimizer)
            distances += [address(dealing.part(variable)) - address(copy_of(variable)) for variable in trained]
        assert (trained[0].numpy() != 1).all()
        return distances

    assert ranks(2)(work) == [[0, 0] * 3, [3 * 16 * 4, 4 * 32 * 4] * 3]
