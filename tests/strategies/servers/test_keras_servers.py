"""Keras's methods on parameter servers, which are threads of this process."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.served import served
from tests.strategies.servers.trained import OPTIONS, X, Y, assert_close, fit, links, model_in, with_momentum
from tests.sweeps import some, sweep
from tfdist import compression
from tfdist.parameter_server import Gradients, Hogwild, LocalSteps


@pytest.mark.parametrize("name", some(OPTIONS, 6, first=3))
def test_one_worker_trains_as_keras_does(name):
    alone = model_in(**OPTIONS[name])
    expected = fit(alone, validation_data=(X, Y))
    with served(servers=2) as (strategy,):
        model = model_in(strategy, **OPTIONS[name])
        history = fit(model, validation_data=(X, Y))
        assert_close(model, alone)
        for key, values in expected.history.items():
            np.testing.assert_allclose(history.history[key], values, rtol=1e-4, err_msg=key)
        assert int(model.optimizer.iterations) == 12


@pytest.mark.parametrize(
    ("method", "pushes"),
    some(
        [
            (compression.BFloat16(), None),
            (compression.BFloat16(), LocalSteps(2)),
            (compression.Schedule({0: None, 3: compression.TopK(0.5)}), None),
            (compression.Schedule({0: None, 3: compression.TopK(0.5)}), LocalSteps(2)),
        ],
        every=4,
        first=3,
    ),
)
def test_compressed_gradients_train_nearly_as_well(method, pushes):
    alone = model_in(optimizer=lambda: keras.optimizers.SGD(0.1), hidden=(8,))
    expected = fit(alone, epochs=5)
    with served(servers=2, compression=compression.skip_small(method, elements=0), pushes=pushes) as (strategy,):
        model = model_in(strategy, optimizer=lambda: keras.optimizers.SGD(0.1), hidden=(8,))
        history = fit(model, epochs=5)
        np.testing.assert_allclose(history.history["loss"][-1], expected.history["loss"][-1], rtol=0.1)
        (link,) = links(model)
        state = link._packers[0]._states[0]
        assert state.step == link.session.pushes - (0 if isinstance(method, compression.BFloat16) else 3)
        assert state.array("residual", state.arrays["residual"]).any()


@pytest.mark.parametrize(
    "options", [sweep({}, id="pulls"), pytest.param({"compression": compression.BFloat16()}, id="pushes and pulls")]
)
@pytest.mark.parametrize("method", [sweep(compression.BFloat16()), compression.TopK(0.3)], ids=str)
def test_compressed_parameters_train_nearly_as_well(method, options):
    expected = fit(model_in(optimizer=lambda: keras.optimizers.SGD(0.1), hidden=(8,)), epochs=5)
    with served(servers=2, pull_compression=compression.skip_small(method, elements=0), **options) as (strategy,):
        model = model_in(strategy, optimizer=lambda: keras.optimizers.SGD(0.1), hidden=(8,))
        history = fit(model, epochs=5, validation_data=(X, Y))
        np.testing.assert_allclose(history.history["loss"][-1], expected.history["loss"][-1], rtol=0.1)
        loss = model.evaluate(X, Y, verbose=0)
        np.testing.assert_allclose(loss, history.history["val_loss"][-1], rtol=1e-6, err_msg="the servers' own")
        (link,) = links(model)
        assert all(replica._decoder._has for replica in link.session._replicas)


@pytest.mark.parametrize("steps", [sweep(1), 3])
def test_data_of_unknown_length_make_no_update_more(steps):
    with served() as (strategy,):
        model = model_in(strategy, steps_per_execution=steps)
        fit(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).filter(lambda x, y: True))
        (link,) = links(model)
        assert (link.session.pushes, int(model.optimizer.iterations)) == (12, 12)


def test_no_batch_of_a_generator_is_left_out():
    def batches():
        yield from ((X[start : start + 10], Y[start : start + 10]) for start in range(0, 50, 10))

    with served() as (strategy,):
        models = model_in(), model_in(strategy)
        for model in models:
            fit(model, batches(), steps_per_epoch=5, epochs=1)
        assert_close(*models)
        assert models[1].optimizer.iterations == 5


class Assigning(keras.callbacks.Callback):
    """Assigns to a model's weights in one of a callback's methods, in the second epoch."""

    def __init__(self, method):
        super().__init__()
        setattr(self, method, lambda place, logs=None: self._assign() if place == 1 else None)

    def _assign(self):
        self.model.set_weights([0.5 * weight + 1 for weight in self.model.get_weights()])


@pytest.mark.parametrize("pushes", [Gradients(), Hogwild(), LocalSteps(1)])
def test_weights_assigned_by_callbacks_are_trained_on(pushes):
    methods = ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"]
    with served(pushes=pushes) as (strategy,):
        for method in methods:
            models = model_in(), model_in(strategy)
            for model in models:
                fit(model, epochs=3, callbacks=[Assigning(method)])
            assert_close(*models)


@pytest.mark.parametrize(("pushes", "times"), [(Gradients(), 1), (LocalSteps(1), 0)])
def test_optimizer_variables_that_stay_the_servers_are_named(caplog, pushes, times):
    with served(pushes=pushes) as (strategy,):
        model = model_in(strategy)
        fit(model, epochs=2, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))])
        model.evaluate(X, Y, verbose=0)
        model.optimizer.learning_rate = 0.2
        model.set_weights(model.get_weights())
        assert "was assigned" not in caplog.text
        for variable in model.optimizer.variables:
            variable.assign(keras.ops.zeros_like(variable))
        fit(model, epochs=1)
    assert len(re.findall(r"a variable of the optimizer sgd\w* was assigned to, but", caplog.text)) == times


def test_custom_loop_trains_as_keras_does():
    alone, optimizer = model_in(), keras.optimizers.SGD(0.1)
    with served() as (strategy,):
        model = model_in(strategy)
        with strategy.scope():
            served_optimizer = keras.optimizers.SGD(0.1)

        def step(model, optimizer, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        @tf.function
        def on_servers(x, y):
            strategy.run(step, args=(model, served_optimizer, x, y))

        for _ in range(3):
            on_servers(tf.constant(X), tf.constant(Y))
            step(alone, optimizer, X, Y)
        assert_close(model, alone)


def test_gradients_are_applied_outside_the_scope():
    alone, optimizer = model_in(), keras.optimizers.SGD(0.1)
    with served() as (strategy,):
        model = model_in(strategy)
        with strategy.scope():
            served_optimizer = keras.optimizers.SGD(0.1)
        for using, trained in ((served_optimizer, model), (optimizer, alone)):
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((trained(X, training=True) - Y) ** 2)
                gradients = tape.gradient(loss, trained.trainable_variables)
                using.apply_gradients(zip(gradients, trained.trainable_variables, strict=True))
        assert_close(model, alone)
        assert strategy.extended.link_of(served_optimizer).session.pushes == 2


def test_eager_steps_of_a_frozen_model_attach_nothing():
    with served() as (strategy,):
        model = model_in(strategy, run_eagerly=True)
        model.trainable = False
        model.compile("sgd", "mse", run_eagerly=True)
        fit(model)
        assert strategy.extended.link_of(model.optimizer) is None


def test_steps_are_traced_once():
    """A `tf.function` that makes variables is traced again: what a link makes of the optimizer is made outside."""
    traces = []

    class Traced(keras.Sequential):
        def train_step(self, data):
            traces.append(data)
            return super().train_step(data)

    with served() as (strategy,), strategy.scope():
        model = Traced([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile(with_momentum(), "mse")
        fit(model, epochs=1)
    assert len(traces) == 1


def test_swapping_averages_is_refused():
    with served() as (strategy,):
        model = model_in(strategy, optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True))
        with pytest.raises(ValueError, match=r"SwapEMAWeights swaps .* on the parameter servers"):
            fit(model, callbacks=[keras.callbacks.SwapEMAWeights()])
