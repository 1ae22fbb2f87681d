"""Several optimizers and models on the same parameter servers, which are threads of this process."""

import contextlib
import threading

import keras
import pytest
import tensorflow as tf

from tests.strategies.served import served
from tests.strategies.servers.trained import X, Y, assert_close, fit, links, model_in
from tests.sweeps import sweep
from tfdist.parameter_server import BoundedStaleness
from tfdist.parameter_server.worker.client import MessageRefusedError


class Pair(keras.Model):
    """Two models in one step, as of a GAN, which builds them; no `call`."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")]) for _ in range(2)]

    def compile(self, **options):
        super().compile(**options)
        self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]

    def train_step(self, data):
        x, y = data
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((part(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("data", ["own", sweep("shared")])
def test_custom_train_step_works_without_call(data):
    alone = Pair()
    alone.compile(run_eagerly=True)
    with served(data=data) as (strategy,):
        with strategy.scope():
            model = Pair()
            model.compile()
        for each_model in (model, alone):
            fit(each_model)
        assert_close(model, alone)


def test_layers_are_frozen_and_thawed():
    """With `compile` in between, as transfer learning does."""

    def train(model):
        is_eager = model.run_eagerly
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=is_eager)
        fit(model, epochs=1)
        model.layers[0].trainable = True
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=is_eager)
        fit(model, epochs=1)

    alone = model_in(hidden=(8,))
    train(alone)
    with served() as (strategy,):
        model = model_in(strategy, hidden=(8,))
        with strategy.scope():
            train(model)
        assert_close(model, alone)


def test_optimizers_take_turns():
    """Each goes on with the newest values, and with its own slots. Steps are eager: each optimizer would trace them."""

    def train(model):
        adam, momentum = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, momentum=0.9)
        for optimizer in (adam, momentum, adam, keras.optimizers.Adam(0.01)):
            model.compile(optimizer, "mse", run_eagerly=True)
            fit(model, epochs=1)

    alone = model_in()
    train(alone)
    with served() as (strategy,):
        model = model_in(strategy)
        with strategy.scope():
            train(model)
        assert_close(model, alone)
        assert len(links(model)) == 1
        for server in strategy.servers:
            assert len(list(server._shards)) == 1, "the others are over"


class TwoOptimizers(keras.Model):
    """Each half of the variables has its optimizer."""

    def __init__(self):
        super().__init__()
        self.halves = [keras.layers.Dense(2), keras.layers.Dense(2)]
        self.others = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)]

    def call(self, inputs):
        return self.halves[0](inputs) + self.halves[1](inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        variables = [half.trainable_variables for half in self.halves]
        for optimizer, half_variables, given in zip(
            self.others, variables, tape.gradient(loss, variables), strict=True
        ):
            optimizer.apply(given, half_variables)
        return {"loss": loss}


@pytest.mark.parametrize(("steps", "fits"), [(1, False), (2, True)])
def test_steps_with_several_optimizers_need_some_slack(steps, fits):
    with served(mode=BoundedStaleness(steps)) as (strategy,):
        with strategy.scope():
            model = TwoOptimizers()
            model.compile()
        with (
            contextlib.nullcontext() if fits else pytest.raises(ValueError, match=r"of a GAN, need BoundedStaleness\(2")
        ):
            fit(model, epochs=1)


def test_two_models_with_a_shared_layer_may_not_be_trained_in_turn():
    with served() as (strategy,), strategy.scope():
        shared, models = keras.layers.Dense(4), []
        for _ in range(2):
            models.append(keras.Sequential([keras.layers.Input((4,)), shared, keras.layers.Dense(2)]))
            models[-1].compile("sgd", "mse")
            fit(models[-1], epochs=1)
        with pytest.raises(tf.errors.OpError, match="do not update variables by two optimizers in turn"):
            fit(models[0], epochs=1)


def test_restarted_worker_trains_finished_model_alone(caplog):
    """The worker was started again, and its script begins with the first call of `fit`."""
    with served(workers=2) as (first, second):
        chief, worker = (model_in(strategy, "adam", run_eagerly=True) for strategy in (first, second))
        fit(chief, epochs=1)
        with first.scope():
            chief.compile("sgd", "mse", run_eagerly=True)
        fit(chief, epochs=1)
        fit(worker, epochs=2)
        alone = model_in(optimizer="adam")
        fit(alone, epochs=2)
        assert_close(worker, alone)
        assert "all other workers have finished training the model Adam-" in caplog.text
        with second.scope():
            worker.compile("sgd", "mse", run_eagerly=True)
        fit(worker, epochs=1)
        chief.evaluate(X, Y, verbose=0)
        assert_close(worker, chief, rtol=0)


def test_second_model_unlike_the_chiefs_is_refused():
    """The worker would wait for the chief's values for ever."""
    with served(workers=2) as (first, second):
        chief, worker = (model_in(strategy, run_eagerly=True) for strategy in (first, second))
        for model in (chief, worker):
            fit(model, epochs=1)
        fit(model_in(first, "adam", run_eagerly=True), epochs=1)
        with pytest.raises(MessageRefusedError, match="but the chief trains Adam-"):
            fit(model_in(second, run_eagerly=True), epochs=1)


def test_models_are_trained_in_several_threads():
    with served() as (strategy,):
        models = [model_in(strategy) for _ in range(2)]
        threads = [threading.Thread(target=fit, args=(model,), daemon=True) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        alone = model_in()
        fit(alone)
        for model in models:
            assert_close(model, alone)
