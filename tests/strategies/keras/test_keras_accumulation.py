"""Accumulated gradients at the ends of epochs, in files and after them, compared with plain Keras's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import on_ranks
from tests.sweeps import sweep
from tfdist.strategies.keras.keras_optimizers import accumulators

X = np.random.default_rng(0).normal(size=(17, 3)).astype("float32")
Y = X[:, :1] ** 2
STEPS = 5
"""Steps of an epoch, the last on one sample; four of them make an update."""


def scaled():
    inner = keras.optimizers.Adam(0.05, gradient_accumulation_steps=4, clipnorm=0.3)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=16.0)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=4),
    "loss scale": scaled,
}


def model_of(optimizer):
    first, last = (keras.initializers.GlorotUniform(seed=seed) for seed in range(2))
    layers = keras.layers.Dense(2, "tanh", kernel_initializer=first), keras.layers.Dense(1, kernel_initializer=last)
    model = keras.Sequential([keras.layers.Input((3,)), *layers])
    model.compile(optimizer(), "mse")
    return model


def fit(model, epochs, **options):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    return model.fit(data, epochs=epochs, verbose=0, **options)


def assert_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def sums(model):
    return [variable.numpy() for variable in accumulators(model.optimizer)]


@pytest.mark.parametrize("name", [sweep("momentum"), "loss scale"])
def test_the_writer_has_all_that_is_accumulated_after_an_epoch(ranks, name):
    alone = model_of(OPTIMIZERS[name])
    expected = []
    gathers = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: expected.append(sums(alone)))
    fit(alone, 3, callbacks=[gathers])

    def work(strategy):
        with strategy.scope():
            model = model_of(OPTIMIZERS[name])
        seen = []
        fit(model, 3, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(sums(model)))])
        return seen, model.get_weights()

    (writer, weights), (other, other_weights) = on_ranks(ranks(2), work)
    assert all(np.abs(array).max() > 0 for array in expected[0])
    for mine, theirs, plain in zip(writer, other, expected, strict=True):
        assert_close(mine, plain)
        assert not any(array.any() for array in theirs)
    assert_close(weights, alone.get_weights())
    assert_close(other_weights, alone.get_weights())


def loaded(strategy, folder, name):
    with strategy.scope():
        return keras.models.load_model(folder / "model.keras")


def restored(strategy, folder, name):
    with strategy.scope():
        model = model_of(OPTIMIZERS[name])
        model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / "optimizer.weights.h5")
    return model


@pytest.mark.parametrize(
    ("load", "devices"), [(restored, ["CPU:0"]), (loaded, ["CPU:0", "CPU:1"])], ids=["weights", "model, two devices"]
)
def test_what_is_saved_between_two_updates_goes_on_as_in_plain_keras(ranks, tmp_path, load, devices):
    """In a process alone, and on two ranks."""
    name = "momentum"
    never_stopped = model_of(OPTIMIZERS[name])
    fit(never_stopped, 2)

    def saved(strategy):
        with strategy.scope():
            model = model_of(OPTIMIZERS[name])
        fit(model, 1)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "optimizer.weights.h5")
        strategy.extended.all_processes.barrier()

    def gone_on(strategy):
        model = load(strategy, tmp_path, name)
        fit(model, 1)
        return model.get_weights()

    on_ranks(ranks(2), saved, devices=devices)
    alone = keras.models.load_model(tmp_path / "model.keras")
    fit(alone, 1)
    assert_close(alone.get_weights(), never_stopped.get_weights())
    for weights in on_ranks(ranks(2), gone_on, devices=devices):
        assert_close(weights, never_stopped.get_weights())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_file_with_one_process_part_of_accumulated_gradients_is_told_of(ranks, tmp_path, caplog, name):
    def work(strategy):
        with strategy.scope():
            model = model_of(OPTIMIZERS[name])

        def saved():
            model.save_weights(tmp_path / f"{strategy.rank}.weights.h5")
            strategy.extended.all_processes.barrier()
            return "the file has the gradients that this process has accumulated" in caplog.text

        fit(model, 1)  # of five steps
        told = [saved()]
        for _ in range(3):
            model.train_on_batch(X[:4], Y[:4])
        told.append(saved())  # eight steps are two updates
        model.train_on_batch(X[:4], Y[:4])
        return [*told, saved()]

    assert on_ranks(ranks(2), work) == [[False, False, True]] * 2


def test_backup_between_two_updates_goes_on_as_if_never_stopped(ranks, tmp_path):
    never_stopped = model_of(OPTIMIZERS["momentum"])
    fit(never_stopped, 2)

    class StopError(Exception):
        pass

    def stop(epoch, logs):
        raise StopError

    def interrupted(strategy):
        with strategy.scope():
            model = model_of(OPTIMIZERS["momentum"])
        backup = keras.callbacks.BackupAndRestore(tmp_path)
        killed = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 1 and stop(epoch, logs))
        with pytest.raises(StopError):
            fit(model, 2, callbacks=[backup, killed])
        strategy.extended.all_processes.barrier()
        with strategy.scope():
            again = model_of(OPTIMIZERS["momentum"])
        fit(again, 2, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
        return again.get_weights()

    for weights in on_ranks(ranks(2), interrupted):
        assert_close(weights, never_stopped.get_weights())
