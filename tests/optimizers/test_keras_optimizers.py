import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import PeerLostError
from tfdist.optimizers.gradients import GradientAverager
from tfdist.optimizers.keras_optimizers import attach, gradients_of
from tfdist.private import epochs
from tfdist.private.keras import tf_trainer
from tfdist.strategies.keras import compiled_functions

call = compiled_functions.call


def test_gradients_of_finds_averager_of_wrapped_optimizers():
    tfdist.init()
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD())
    assert gradients_of(optimizer) is gradients_of(keras.optimizers.LossScaleOptimizer(optimizer)) is not None
    assert gradients_of(keras.optimizers.SGD()) is None
    assert gradients_of(None) is gradients_of("sgd") is None


def test_fit_and_evaluate_do_not_wait_for_the_autotuner(monkeypatch):
    """Once for each call of `fit`, for its validation data, and for each call of `evaluate`."""
    untuned = []
    monkeypatch.setattr(epochs, "untune", untuned.append)
    tfdist.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x, y = tf.ones([4, 3]), tf.ones([4, 1])
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    assert not untuned
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    model.fit(x, y, validation_data=(x, y), verbose=0)
    model.evaluate(x, y, verbose=0)
    assert len(untuned) == 3
    model.train_on_batch(x, y)
    assert len(untuned) == 3


@pytest.fixture
def traces(monkeypatch):
    """The traces of Keras's `train_step`."""
    found, trainer = [], tf_trainer.TensorFlowTrainer
    original = trainer.train_step
    monkeypatch.setattr(trainer, "train_step", lambda *given: found.append(1) or original(*given))
    return found


def test_errors_of_the_job_are_raised_as_they_are(ranks):
    """TensorFlow wraps what a graph's host call raises."""

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.job.fail(PeerLostError("rank 1 is lost"))

    def work(group):
        optimizer = keras.optimizers.SGD()
        attach(optimizer, GradientAverager(group))
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer, "mse")
        model.job = group.engine
        model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=2, verbose=0, callbacks=[Fails()])

    with pytest.raises(PeerLostError, match=r"^rank 1 is lost"):
        ranks(2)(work)


def compiled(loss="mse", kind=keras.Sequential, **how):
    tfdist.init()
    model = kind([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.Adam()), loss, **{"metrics": ["mae"], **how})
    return model


def test_steps_are_traced_once(traces):
    """Keras makes the variables of metrics and of the optimizer in a first trace, if they are not made before."""
    x, y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")
    compiled().fit(x, y, batch_size=2, verbose=0)
    compiled().train_on_batch(x, y)
    assert len(traces) == 2


def test_what_cannot_be_built_before_is_traced_by_keras(traces):
    """A loss that fails with other rows than its own. Data that do not tell all sizes are not drawn before."""
    seen = []

    def batches():
        for number in range(3):
            seen.append(number)
            yield np.ones([2, 3], "float32"), np.ones([2, 1], "float32")

    spec = tf.TensorSpec([None, None]), tf.TensorSpec([None, None])
    model = compiled()
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model.fit(data.apply(tf.data.experimental.assert_cardinality(3)), verbose=0)
    assert seen == [0, 1, 2]
    assert int(model.optimizer.iterations) == 3

    def of_two_rows(y, outputs):
        assert y.shape[0] == 2
        return keras.losses.mean_squared_error(y, outputs)

    model = compiled(of_two_rows)
    data = tf.data.Dataset.from_tensors((np.ones([2, 3], "float32"), np.ones([2, 1], "float32")))
    model.fit(data, verbose=0)
    assert int(model.optimizer.iterations) == 1
    assert len(traces) == 3


def test_steps_that_keras_does_not_trace_are_left_alone():
    """A step of one's own may update some weights only, and an eager model sees tensors that have values."""

    class UpdatesKernel(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x))
            kernel = self.layers[0].kernel
            self.optimizer.apply(tape.gradient(loss, [kernel]), [kernel])
            return {"loss": loss}

    eager = []

    def loss(y, outputs):
        eager.append(tf.executing_eagerly())
        return keras.losses.mean_squared_error(y, outputs)

    x, y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")
    own = compiled(kind=UpdatesKernel, metrics=None)
    own.fit(x, y, verbose=0)
    assert [variable.shape for variable in own.optimizer.variables[2:]] == [(3, 1)] * 2
    compiled(loss, run_eagerly=True).fit(x, y, verbose=0)
    assert eager == [True]


class OwnStep(keras.Model):
    def train_step(self, data):
        """As Keras's."""
        return super().train_step(data)


@pytest.mark.parametrize("kind", [keras.Model, OwnStep])
def test_xla_compiles_only_the_train_step_of_keras(monkeypatch, kind):
    """Only Keras's own step is compiled: for a user's step, Keras may ask for XLA only because there is a GPU."""
    compiled = []
    monkeypatch.setattr(compiled_functions, "call", lambda *given: compiled.append(1) or call(*given))
    tfdist.init()
    weights = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3,))
        model = kind(inputs, keras.layers.Dense(1)(inputs))
        model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=jit_compile)
        model.fit(tf.ones([4, 3]), tf.ones([4, 1]), verbose=0)
        assert (model.jit_compile, bool(compiled)) == (jit_compile, jit_compile and kind is keras.Model)
        weights.append(model.get_weights())
    np.testing.assert_allclose(weights[1][0], weights[0][0], rtol=1e-6)
