"""Distributions of one process; `tests/multiprocess/test_keras_distribution.py` has the training of several."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.distribution import current

kd = keras.distribution
X = np.ones((4, 3), np.float32)


@pytest.fixture(autouse=True)
def _enabled():
    tfdist.enable_keras_distribution()


def made():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def parallel():
    return kd.ModelParallel(layout_map=kd.LayoutMap(kd.DeviceMesh((1, 1), ["data", "model"], ["cpu:0"])))


def test_a_distribution_sets_its_strategy_and_none_leaves_it():
    a, b = kd.DataParallel(devices=["cpu:0"]), parallel()
    for distribution in (a, b, a):
        kd.set_distribution(distribution)
        assert tf.distribute.get_strategy() is current.strategy_of(distribution)
        assert made().distribute_strategy is current.strategy_of(distribution)
    with b.scope():
        assert tf.distribute.get_strategy() is current.strategy_of(b)
    assert tf.distribute.get_strategy() is current.strategy_of(a)
    kd.set_distribution(None)
    assert not tf.distribute.has_strategy()
    assert kd.distribution() is None


def test_the_strategy_of_weights_in_parts_asks_the_layouts():
    strategy = current.strategy_of(parallel())
    with strategy.scope():
        assert not strategy.extended.divides(keras.Variable(np.ones((4096, 4096), np.float32)))


def test_what_is_no_distribution_is_refused():
    distribution = kd.DataParallel(devices=["cpu:0"])
    kd.set_distribution(distribution)
    with pytest.raises(TypeError, match="takes a DataParallel, a ModelParallel or None; got 'data'"):
        kd.set_distribution("data")
    assert kd.distribution() is distribution


def test_a_mesh_of_others_leaves_what_was_set():
    distribution = kd.DataParallel(devices=["cpu:0"])
    kd.set_distribution(distribution)
    with pytest.raises(ValueError, match="is of the devices cpu:7; this process has cpu:0, "):
        kd.set_distribution(kd.DataParallel(devices=["cpu:7"]))
    assert kd.distribution() is distribution
    assert tf.distribute.get_strategy() is current.strategy_of(distribution)


def test_devices_of_a_process_have_whole_weights_each(caplog):
    mesh = kd.DeviceMesh((1, 2), ["data", "model"], ["cpu:0", "cpu:1"])
    kd.set_distribution(kd.ModelParallel(layout_map=kd.LayoutMap(mesh)))
    assert tf.distribute.get_strategy().num_replicas_in_sync == 2
    assert [record.getMessage() for record in caplog.records if "tfdist run -n 2" in record.getMessage()]


def test_a_scope_of_another_strategy_is_named():
    with (
        tfdist.AllReduceStrategy(devices=["CPU:0"]).scope(),
        pytest.raises(RuntimeError, match=r"set_distribution\(DataParallel\) within the scope of AllReduceStrategy"),
    ):
        kd.set_distribution(kd.DataParallel(devices=["cpu:0"]))
    assert kd.distribution() is None


@pytest.mark.parametrize("method", ["compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch"])
def test_a_model_that_was_made_before_is_named(method):
    model = made()
    arguments = {"compile": (), "predict": (X,)}.get(method, (X, X))
    kd.set_distribution(kd.DataParallel(devices=["cpu:0"]))
    with pytest.raises(ValueError, match=rf"{method}: the model {model.name} was not made under .*DataParallel\. Make"):
        getattr(model, method)(*arguments)


def test_an_optimizer_that_was_made_before_is_named():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.inner_optimizer.build([])
    kd.set_distribution(kd.DataParallel(devices=["cpu:0"]))
    model = made()
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=r"fit: the optimizer .* was not made under"):
        model.fit(X, X, verbose=0)


def test_a_model_goes_on_when_its_distribution_is_left():
    kd.set_distribution(kd.DataParallel(devices=["cpu:0"]))
    model = made()
    kd.set_distribution(None)
    assert np.isfinite(model.fit(X, X, verbose=0).history["loss"]).all()


def test_keys_are_checked_in_fit(monkeypatch):
    monkeypatch.setattr(current.settings, "strict", True)
    distribution = parallel()
    distribution._layout_map["x/kernel"] = (None, "model")
    kd.set_distribution(distribution)
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    unbuilt.compile("sgd", "mse")
    for model in (made(), unbuilt):
        with pytest.raises(ValueError, match="none of the keys 'x/kernel' of the LayoutMap matches"):
            model.fit(X, X, verbose=0)


def test_arrays_that_are_divided_already_are_refused():
    kd.set_distribution(kd.DataParallel(devices=["cpu:0"], auto_shard_dataset=False))
    with pytest.raises(
        ValueError, match=r"fit\(x=…\) with auto_shard_dataset=False must be a tf\.data\.Dataset.*ndarr"
    ):
        made().fit(X, X, verbose=0)


def test_moments_are_of_whole_batches_and_files_are_keras_own():
    called = []
    kd.set_distribution(kd.DataParallel(devices=["cpu:0"]))
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    original = current._of_whole_batches(lambda layer, inputs, mask: called.append(layer.synchronized))
    original(layer, X, None)
    kd.set_distribution(None)
    original(layer, X, None)
    assert called == [True, False]
    assert layer.get_config()["synchronized"] is False


def test_a_copy_gets_a_strategy_of_its_own():
    distribution = kd.DataParallel(devices=["cpu:0"])
    strategy = current.strategy_of(distribution)
    assert current.strategy_of(distribution) is strategy
    for made_from in (copy.deepcopy(distribution), pickle.loads(pickle.dumps(distribution))):
        assert current.strategy_of(made_from) is not strategy
