"""Scripts that use `keras.distribution` against plain Keras; a check for each name in TEST_CASES."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks
from comparing import assert_close

import tfdist
from tfdist.strategies.divided import weight_parts

FOLDER = sys.argv[1]
ROWS, BATCH = 22, 8  # a last batch of 6 rows

kd = keras.distribution
tfdist.enable_keras_distribution()
kd.initialize()
rank, size = tfdist.rank(), tfdist.size()
generator = np.random.default_rng(0)
X, Y = generator.normal(size=(ROWS, 7)), generator.normal(size=(ROWS, 2))
layers = keras.layers


def functional():
    inputs = layers.Input((7,))
    hidden = layers.BatchNormalization()(layers.Dense(6, "tanh", name="d1")(inputs))
    return keras.Model(inputs, layers.Dense(2, name="d2")(hidden))


def sequential():
    return keras.Sequential([layers.Input((7,)), layers.Dense(6, "tanh", name="d1"), layers.Dense(2, name="d2")])


def compiled(make, loss="mse", **how):
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, **how)
    return model


def fit(model, x=X, y=Y, batch_size=BATCH, **how):
    return model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **how).history["loss"]


def assert_as_plain(model, losses):
    """Losses and weights are those of plain Keras, which knows no distribution."""
    weights, current = model.get_weights(), kd.distribution()
    kd.set_distribution(None)
    if rank == 0:
        plain = compiled(sequential if isinstance(model, keras.Sequential) else functional, run_eagerly=True)
        np.testing.assert_allclose(losses, fit(plain), rtol=1e-6)
        assert_close(weights, plain.get_weights())
    tfdist.barrier()
    kd.set_distribution(current)


def model_parallel(**layouts):
    layout_map = kd.LayoutMap(kd.DeviceMesh((1, size), ["data", "model"], kd.list_devices()))
    for name, layout in layouts.items():
        layout_map[f".*{name}"] = layout
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def in_parts(model):
    return [weight.path.rpartition("/d")[2] for weight in model.weights if weight_parts.of(weight) is not None]


def guide():
    """Data-parallel and then model-parallel, with nothing left between."""
    assert kd.list_devices() == [f"cpu:{k}" for k in range(size)]
    kd.set_distribution(kd.DataParallel())
    model = compiled(functional)
    assert_as_plain(model, fit(model))
    kd.set_distribution(model_parallel(kernel=(None, "model"), output=("data", None)))
    model = compiled(sequential)
    assert in_parts(model) == (["1/kernel", "2/kernel"])
    assert_as_plain(model, fit(model))


def turns():
    """Distributions take turns, in scopes too; models go on when theirs is left."""
    data, parts = kd.DataParallel(), model_parallel(d1_kernel=(None, "model"), **{"d1/kernel": (None, "model")})
    kd.set_distribution(data)
    with parts.scope():
        model = compiled(sequential)
        assert in_parts(model) == ["1/kernel"]
        with data.scope():
            assert not in_parts(compiled(sequential))
        losses = fit(model)
        assert_as_plain(model, losses)
    assert kd.distribution() is data
    keras.utils.clear_session()
    assert kd.distribution() is None
    assert not tf.distribute.has_strategy()
    assert fit(model)[-1] < losses[-1]


def single_batches():
    """`train_on_batch` and the like take a batch that all processes pass, also one with fewer rows than processes."""
    kd.set_distribution(kd.DataParallel())
    model = compiled(sequential, loss=keras.losses.MeanSquaredError(reduction="sum"))
    batches, weights = [slice(0, 8), slice(8, 15), slice(15, 16)], np.arange(1.0, ROWS + 1)

    def results(model):
        trained = [model.train_on_batch(X[rows], Y[rows], weights[rows]) for rows in batches]
        return [*trained, model.test_on_batch(X, Y)], model.get_weights(), model.predict_on_batch(X)

    found = results(model)
    kd.set_distribution(None)
    if rank == 0:
        plain = compiled(sequential, loss=keras.losses.MeanSquaredError(reduction="sum"), run_eagerly=True)
        for one, other in zip(found, results(plain), strict=True):
            assert_close(list(one), other)
    tfdist.barrier()


def own_data():
    """Each process has batches of its own, which together are a batch."""
    rows = ROWS - ROWS % size
    kd.set_distribution(kd.DataParallel(auto_shard_dataset=False))
    model = compiled(sequential)
    share = slice(rank, rows, size)
    own = tf.data.Dataset.from_tensor_slices((X[share], Y[share])).batch(rows // size)
    losses = fit(model, own, None, None, validation_data=own)
    weights, evaluated = model.get_weights(), model.evaluate(own, verbose=0)
    assert evaluated == model.history.history["val_loss"][-1]
    assert model.predict(own, verbose=0).shape == (rows, 2)
    kd.set_distribution(None)
    if rank == 0:
        plain = compiled(sequential, run_eagerly=True)
        np.testing.assert_allclose(losses, fit(plain, X[:rows], Y[:rows], rows), rtol=1e-6)
        assert_close(weights, plain.get_weights())
        np.testing.assert_allclose(evaluated, plain.evaluate(X[:rows], Y[:rows], verbose=0), rtol=1e-6)
    tfdist.barrier()


def refused():
    with pytest.raises(ValueError, match=f"this job of {size} processes has, one for each process, cpu:0, cpu:1"):
        kd.set_distribution(kd.DataParallel(devices=["cpu:0"]))
    with pytest.raises(tfdist.ClusterSpecError, match=f"started as rank {rank} of a job of {size}"):
        kd.initialize(num_processes=7)
    kd.set_distribution(model_parallel(kernel=(None, "model"), **{"d1/kernel": (None, "model")}))
    with pytest.raises(ValueError, match="matches multiple layout"):
        sequential()
    kd.set_distribution(model_parallel(bias=(None, "model")))
    with pytest.raises(ValueError, match=r"the layout \(None, 'model'\) has 2 axes; the weight .*bias of shape \(6,\)"):
        sequential()


run_checks(globals(), lambda: (keras.backend.set_floatx("float64"), kd.set_distribution(None)))
tfdist.barrier()
