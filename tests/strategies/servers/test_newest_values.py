"""What the methods of a model on parameter servers read: the newest values."""

import keras
import numpy as np
import pytest

from tests.strategies.served import served
from tests.strategies.servers.trained import OPTIONS, X, Y, assert_close, fit, links, model_in
from tests.sweeps import sweep


def models_in(*strategies, **options):
    """Models whose steps are eager, as what is read around them does not depend on a graph."""
    return [model_in(strategy, run_eagerly=True, **options) for strategy in strategies]


@pytest.mark.parametrize("method", ["evaluate", sweep("predict")])
def test_evaluate_and_predict_read_newest_values(method):
    with served(workers=2) as (first, second):
        chief, worker = models_in(first, second)
        fit(chief, epochs=1)
        fit(worker, epochs=1)
        before = chief.get_weights()
        getattr(chief, method)(X, *([Y] if method == "evaluate" else []), verbose=0)
        assert_close(chief, worker, rtol=0)
        assert not np.array_equal(before[0], chief.get_weights()[0])


def test_an_epoch_begins_with_the_newest_values():
    with served(workers=2) as (first, second):
        chief, worker = models_in(first, second)
        fit(chief, epochs=1)  # the chief makes the model on the servers
        between = Between(worker)
        fit(chief, epochs=2, callbacks=[between])
        for weight, expected in zip(between.begun_with, between.left, strict=True):
            np.testing.assert_array_equal(weight, expected)
        (link,) = links(chief)
        assert link.session.iterations == 16, "the chief's three epochs of four steps, and the worker's"


class Between(keras.callbacks.Callback):
    """Another worker trains between two epochs; nobody waits for this one meanwhile."""

    def __init__(self, other):
        super().__init__()
        self.other, self.left, self.begun_with = other, None, None

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            (link,) = links(self.model)
            assert link.session.is_suspended
            fit(self.other, epochs=1)
            self.left = self.other.get_weights()

    def on_train_batch_begin(self, batch, logs=None):
        if self.left is not None and self.begun_with is None:
            self.begun_with = self.model.get_weights()


@pytest.mark.parametrize("read", [lambda model, path: model.evaluate(X, Y, verbose=0), keras.Model.save])
def test_weights_that_the_chief_sets_are_the_newest(read, tmp_path):
    with served() as (strategy,):
        (model,) = models_in(strategy)
        fit(model, epochs=1)
        kept = [weight + 1 for weight in model.get_weights()]
        model.set_weights(kept)
        read(model, tmp_path / "model.keras")
        for array, other in zip(model.get_weights(), kept, strict=True):
            np.testing.assert_array_equal(array, other)


def test_the_best_weights_are_restored():
    stopping = {"monitor": "val_loss", "mode": "max", "patience": 0, "restore_best_weights": True}
    alone = model_in()
    fit(alone, epochs=3, validation_data=(X, Y), callbacks=[keras.callbacks.EarlyStopping(**stopping)])
    with served() as (strategy,):
        model = model_in(strategy)
        fit(model, epochs=3, validation_data=(X, Y), callbacks=[keras.callbacks.EarlyStopping(**stopping)])
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-4)
        fit(model, epochs=1)
        fit(alone, epochs=1)
        assert_close(model, alone)


def test_moving_averages_stay_after_fit():
    alone = model_in(**OPTIONS["averages"])
    fit(alone)
    with served() as (strategy,):
        model = model_in(strategy, **OPTIONS["averages"])
        fit(model)
        model.evaluate(X, Y, verbose=0)
        assert_close(model, alone)
        fit(model, epochs=1)
        fit(alone, epochs=1)
        assert_close(model, alone)


def test_moving_averages_are_what_other_workers_read_after_fit():
    """Also before the chief has given them to the servers, and what it assigns then is newer."""
    with served(workers=2) as (first, second):
        chief, worker = models_in(first, second, **OPTIONS["averages"])
        fit(chief, epochs=1)
        fit(worker, epochs=1)
        averages = worker.get_weights()
        worker.evaluate(X, Y, verbose=0)
        for weight, expected in zip(worker.get_weights(), averages, strict=True):
            np.testing.assert_array_equal(weight, expected)
        chief.set_weights(assigned := [np.ones_like(weight) for weight in averages])
        chief.evaluate(X, Y, verbose=0)
        worker.evaluate(X, Y, verbose=0)
        for weight, expected in zip(worker.get_weights(), assigned, strict=True):
            np.testing.assert_array_equal(weight, expected)


def test_evaluate_of_frozen_model_reads_newest_values():
    with served(workers=2) as (first, second):
        chief, worker = models_in(first, second)
        fit(chief, epochs=1)
        fit(worker, epochs=1)
        chief.trainable = False
        chief.evaluate(X, Y, verbose=0)
        assert_close(chief, worker, rtol=0)
