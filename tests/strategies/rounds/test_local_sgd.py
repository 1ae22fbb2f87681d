"""The strategy on one process; `tests/multiprocess/test_local_sgd.py` has it on several."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.strategies import outer_weights
from tfdist.local_sgd import Averaging, Outer, Streaming


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sync_every": 0}, ValueError, "got sync_every=0"),
        ({"sync_every": "8"}, ValueError, "got sync_every='8'"),
        ({"start_after": True}, ValueError, "a whole number of at least 0; got True"),
        ({"slots": "mean"}, ValueError, "must be 'keep' or 'average'; got 'mean'"),
        ({"rule": keras.optimizers.SGD(0.7)}, TypeError, r"a rule of tfdist.local_sgd, such as Outer\(.*; got <keras"),
        ({"rule": Averaging}, TypeError, "a rule of tfdist.local_sgd"),
        ({"streaming": 4}, TypeError, "a tfdist.local_sgd.Streaming; got 4"),
        ({"sync_every": 8, "streaming": Streaming(2, delay=4)}, ValueError, "choose a delay below 4"),
        ({"sync_every": 8, "streaming": Streaming(9)}, ValueError, "at least one step for each fragment; got 8 steps"),
        ({"slots": "average", "streaming": Streaming(delay=1)}, ValueError, "exchanged at once"),
        ({"compression": 8}, TypeError, "8"),
        ({"algorithm": "rings"}, ValueError, "got 'rings'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tfdist.LocalSGDStrategy(**arguments)


def test_numpy_integers_are_accepted():
    assert tfdist.LocalSGDStrategy(sync_every=np.int64(8)).size == 1


def test_a_process_alone_moves_its_outer_weights():
    half = tfdist.LocalSGDStrategy(sync_every=2, rule=Outer(keras.optimizers.SGD(0.5)))
    outer_weights.assert_moved(half)


def test_weights_that_a_graph_assigns_are_where_the_next_fit_begins():
    """Nothing notes such an assignment, which the outer optimizer would take for a change of a round."""
    strategy = tfdist.LocalSGDStrategy(sync_every=2, rule=Outer(keras.optimizers.SGD(0.5)))
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1)))).batch(4)
    model.fit(data, shuffle=False, verbose=0)

    @tf.function(autograph=False)
    def assign():
        for weight in model.weights:
            weight.assign(tf.fill(weight.shape, 3.0))

    assign()
    model.fit(data, shuffle=False, verbose=0)
    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, 3)


def test_an_epoch_begins_at_the_number_of_steps_that_a_backup_has_restored():
    """Also if the model has trained before; callbacks restore backups when `fit` has begun."""

    class Restores(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.optimizer.iterations.assign(9)

    strategy = tfdist.LocalSGDStrategy(sync_every=1, start_after=9, rule=Outer(keras.optimizers.SGD(0.5)))
    with strategy.scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        model = keras.Sequential([keras.layers.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.25), "mse", run_eagerly=True)
    data = tf.data.Dataset.from_tensors((np.ones((4, 1)), np.zeros((4, 1))))
    model.fit(data, shuffle=False, verbose=0)
    assert layer.kernel.numpy() == 0.5  # a step of SGD
    model.fit(data, shuffle=False, verbose=0, callbacks=[Restores()])
    assert layer.kernel.numpy() == 0.375  # half a step, by the outer optimizer
