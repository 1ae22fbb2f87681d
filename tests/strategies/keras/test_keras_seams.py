import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.strategies.ranked import Ranked, on_ranks
from tfdist.errors import PeerLostError
from tfdist.private.keras import base_trainer, seed_generator, tf_trainer
from tfdist.strategies.keras import keras_seams

X, Y = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.ones((4, 1), np.float32)


def model_in(strategy, *layers, **arguments):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), *layers, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse", **arguments)
    return model


@pytest.mark.usefixtures("strategy")
def test_seams_are_put_in_place_once():
    before = tf_trainer.TensorFlowTrainer.fit
    keras_seams.install()
    assert tf_trainer.TensorFlowTrainer.fit is before


TRAINER = tf_trainer.TensorFlowTrainer


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((TRAINER, name) for name in ("fit", "evaluate", "predict", "train_on_batch", "predict_on_batch")),
        (base_trainer.Trainer, "compile"),
        (seed_generator.SeedGenerator, "next"),
        *((keras.Model, name) for name in ("save", "save_weights", "load_weights", "export")),
        (keras.models, "load_model"),
        (keras.saving, "save_model"),
    ],
)
def test_replaced_keras_functions_keep_name_doc_and_signature(owner, name):
    """Name, documentation and signature."""
    function = getattr(owner, name)
    assert function.__code__.co_filename.startswith(str(Path(tfdist.__file__).parent))
    original = inspect.unwrap(function)
    assert original is not function
    assert original.__module__.startswith("keras.")
    assert (function.__name__, function.__doc__) == (original.__name__, original.__doc__)
    assert inspect.signature(function) == inspect.signature(original)


def test_random_numbers_differ_between_replicas_and_seeds_do_not(ranks):
    """As what Dropout draws; outside of replicas all draw the same."""

    def work(strategy):
        with strategy.scope():
            generator = keras.random.SeedGenerator(5)
        inside = [strategy.run(generator.next).numpy().tolist() for _ in range(2)]
        return inside, np.asarray(generator.next()).tolist(), generator.state.numpy().tolist()

    (first, outside, state), (second, other, of_other) = on_ranks(ranks(2), work)
    assert (outside, state) == (other, of_other)
    drawn = [tuple(seed) for seed in (*first, *second)]
    assert len(set(drawn)) == 4
    assert all(0 <= part < 2**31 for seed in drawn for part in seed)


def test_one_replica_draws_what_plain_keras_draws(ranks):
    expected = np.asarray(keras.random.SeedGenerator(5).next()).tolist()
    strategy = Ranked(ranks(1).groups[0])
    with strategy.scope():
        generator = keras.random.SeedGenerator(5)
    assert strategy.run(generator.next).numpy().tolist() == expected


def test_predict_on_batch_is_of_the_rows_that_a_process_brings(ranks):
    """Any number of rows is allowed, and other processes take no part."""

    def work(strategy):
        model = model_in(strategy)
        before = strategy.extended.group.engine.statistics.collectives
        outputs = [model.predict_on_batch(X[:rows]) for rows in (range(1, 4) if strategy.rank else ())]
        return [part[:, 0].tolist() for part in outputs], strategy.extended.group.engine.statistics.collectives - before

    none, (outputs, communicated) = on_ranks(ranks(2), work)
    assert none == ([], 0)
    assert outputs == [X[:rows].sum(1).tolist() for rows in (1, 2, 3)]
    assert communicated == 0


def test_compile_enters_the_scope_of_the_model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(X, Y, verbose=0)
    assert model.optimizer._distribution_strategy is strategy


@pytest.mark.parametrize(
    ("name", "verbose", "shown"),
    [
        ("fit", "auto", ["auto", 0]),
        ("evaluate", "auto", ["auto", 0]),
        ("evaluate", 2, [2, 2]),
        ("predict", "auto", ["auto", 0]),
    ],
)
def test_one_process_shows_progress_unless_it_is_asked_for(ranks, name, verbose, shown):
    class Seen(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.on_train_begin = self.on_test_begin = self.on_predict_begin = self.note

        def note(self, logs=None):
            self.verbose = self.params["verbose"]

    def work(strategy):
        model, seen = model_in(strategy), Seen()
        data = (X,) if name == "predict" else (X, Y)
        getattr(model, name)(*data, verbose=verbose, callbacks=[seen])
        return seen.verbose

    assert on_ranks(ranks(2), work) == shown


def test_state_that_a_loop_has_left_different_is_averaged_before_evaluate(ranks):
    def work(strategy):
        model = model_in(strategy, keras.layers.BatchNormalization())
        mean = model.layers[0].moving_mean
        mean.assign([4.0 * strategy.rank, 2.0])
        model.evaluate(X, Y, verbose=0)
        return mean.numpy().tolist()

    assert on_ranks(ranks(2), work) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(("fails", "method"), [(True, "fit"), (False, "fit"), (True, "test_on_batch")])
def test_tfdist_errors_leave_graphs_unwrapped(strategy, fails, method):
    """And others as Keras raises them."""
    error = PeerLostError("rank 7 died")

    class Breaks(keras.layers.Layer):
        def call(self, x):
            def host(value):
                if fails:
                    strategy.extended.group.engine.fail(error)
                raise RuntimeError("something else")

            return tf.ensure_shape(tf.py_function(host, [x], x.dtype), x.shape)

    model = model_in(strategy, Breaks())
    expected = (PeerLostError, "rank 7 died") if fails else (tf.errors.OpError, "something else")
    with pytest.raises(expected[0], match=expected[1]) as caught:
        getattr(model, method)(X, Y)
    assert (caught.value is error) == fails
