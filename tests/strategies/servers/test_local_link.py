"""Workers whose own optimizers make the updates; the servers are threads of this process."""

import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.served import served
from tests.strategies.servers.trained import OPTIONS, X, Y, assert_close, fit, links, model_in
from tests.sweeps import some
from tfdist.parameter_server import (
    Asynchronous,
    DelayCompensated,
    ElasticAveraging,
    LocalSteps,
    SoftSync,
    Synchronous,
)
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

RATE = 0.125


@pytest.mark.parametrize(("name", "steps"), some(itertools.product([*OPTIONS, "constraint"], [3, 1]), 5, first=3))
def test_one_worker_trains_as_keras_does(name, steps):
    """Three epochs of four batches; what is left after an epoch is pushed then."""
    options = OPTIONS.get(name, {})
    alone = model_in(**options)
    with served(servers=2, pushes=LocalSteps(steps)) as (strategy,):
        model = model_in(strategy, **options)
        for each_model in (alone, model):
            if name == "constraint":
                each_model.layers[0].kernel.constraint = keras.constraints.MaxNorm(0.5)
        expected, history = (fit(each_model, validation_data=(X, Y)).history for each_model in (alone, model))
        assert_close(model, alone)
        for key, values in expected.items():
            np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)
        assert int(model.optimizer.iterations) == 12
        (link,) = links(model)
        assert link.session.pushes == (12 if steps == 1 else 6)


def linear_in(strategy, run_eagerly=True):
    """A model whose gradient is 1 everywhere, so that every step moves it by `RATE`."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(RATE), loss=lambda y, out: out, run_eagerly=run_eagerly)
    return model


def fit_together(models, steps, batch_sizes):
    """`fit` of all workers at the same time, each for its number of steps; then each reads the newest values."""

    def train(model, steps, batch_size):
        ones = tf.ones((batch_size, 1))
        model.fit(tf.data.Dataset.from_tensors((ones, ones)).repeat(steps), shuffle=False, verbose=0)

    arguments = zip(models, steps, batch_sizes, strict=True)
    threads = [threading.Thread(target=train, args=worker_arguments, daemon=True) for worker_arguments in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for model in models:
        model.evaluate(np.ones((1, 1)), np.ones((1, 1)), verbose=0)


@pytest.mark.parametrize(("mode", "moved"), [(Asynchronous(), 12), (Synchronous(), 6)])
def test_changes_of_workers_are_added_or_averaged_by_mode(mode, moved):
    """Two workers make 6 steps each; 4 and 2."""
    with served(2, servers=2, mode=mode, pushes=LocalSteps(4)) as strategies:
        models = [linear_in(strategy) for strategy in strategies]
        fit_together(models, (6, 6), (4, 4))
        for model in models:
            np.testing.assert_allclose(model.get_weights()[0], -RATE * moved)


def test_means_are_weighed_by_the_samples_of_all_steps():
    """One worker moves by 4 steps of 1 sample, the other one by a last push of 2 steps of 4 samples."""
    with served(2, mode=Synchronous(), pushes=LocalSteps(4)) as strategies:
        models = [linear_in(strategy, run_eagerly=False) for strategy in strategies]
        fit_together(models, (4, 2), (1, 4))
        for model in models:
            np.testing.assert_allclose(model.get_weights()[0], -RATE * (4 * 4 + 2 * 8) / 12, rtol=1e-6)


def test_values_assigned_by_chief_replace_server_values():
    with served(2, pushes=LocalSteps(3)) as strategies:
        chief, worker = (linear_in(strategy) for strategy in strategies)
        fit_together((chief, worker), (2, 2), (1, 1))
        chief.set_weights([np.full((1, 1), 5.0), np.zeros(1)])
        fit_together((chief,), (1,), (1,))
        worker.evaluate(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
        np.testing.assert_allclose(worker.get_weights()[0], 5 - RATE)


def elastic(rate, moves):
    """The worker's copy x and the servers' copy c after as many moves of two steps each."""
    x = c = 0.0
    for _ in range(moves):
        x -= 2 * RATE
        moved = rate * (x - c)
        x, c = x - moved, c + moved
    return x, c


def test_elastic_averaging_follows_formula_and_saves_servers_copy(tmp_path):
    with served(servers=2, pushes=ElasticAveraging(steps=2, rate=0.25)) as (strategy,):
        model = linear_in(strategy, run_eagerly=False)
        model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=1, epochs=2, verbose=0)
        x, c = elastic(0.25, 8)
        np.testing.assert_allclose(model.get_weights()[0], x, rtol=1e-5)
        model.save(tmp_path / "model.keras")
        saved = keras.saving.load_model(tmp_path / "model.keras", compile=False)
        np.testing.assert_allclose(saved.get_weights()[0], c, rtol=1e-5)
        loss = model.evaluate(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
        np.testing.assert_allclose(loss, 2 * c, rtol=1e-5)  # kernel and bias move alike
        np.testing.assert_allclose(model.get_weights()[0], x, rtol=1e-5, err_msg="it trains on from its own copy")


def test_elastic_averaging_of_two_workers_uses_default_rate():
    """Both move the servers' copy, and neither by more than its own steps."""
    with served(2, pushes=ElasticAveraging(steps=1)) as strategies:
        models = [linear_in(strategy) for strategy in strategies]
        fit_together(models, (6, 6), (1, 1))
        center = float(models[0].predict(np.ones((1, 1)), verbose=0)[0, 0]) / 2
        for model in models:
            (link,) = links(model)
            assert link._rate == 0.45
            assert float(model.get_weights()[0][0, 0]) < 0
        assert -6 * RATE < center < 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"pushes": ElasticAveraging(), "synchronization": SoftSync(1)},
            "each push moves the servers' values by itself",
        ),
        (
            {"pushes": ElasticAveraging(), "synchronization": Synchronous()},
            "each push moves the servers' values by itself",
        ),
        ({"pushes": LocalSteps(2), "synchronization": Asynchronous(DelayCompensated())}, "corrects gradients"),
        ({"pushes": LocalSteps(2), "data": "shared"}, "the batches of each push of gradients are counted"),
    ],
)
def test_incompatible_options_raise(options, why, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=why):
        ParameterServerStrategy(**options)


def test_what_a_worker_keeps_of_its_program_is_not_pushed_as_a_change():
    """A worker that begins its second fit before the chief has given the servers what both have assigned."""
    with served(2, servers=2, mode=Asynchronous(), pushes=LocalSteps(2)) as strategies:
        models = [linear_in(strategy) for strategy in strategies]
        fit_together(models, (2, 2), (4, 4))
        for model in models:
            model.set_weights([np.full(weight.shape, 10.0) for weight in model.get_weights()])
        fit_together(models[1:], (2,), (4,))
        np.testing.assert_allclose(models[1].get_weights()[0], -RATE * 6)
        fit_together(models[:1], (2,), (4,))
        np.testing.assert_allclose(models[0].get_weights()[0], 10 - RATE * 2)
