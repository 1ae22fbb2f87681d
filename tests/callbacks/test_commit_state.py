"""In a process alone; `tests/multiprocess/test_distributed_optimizer.py` has several."""

import keras
import numpy as np
import pytest

import tfdist

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")


class Ends(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyError("interrupted")


def fit(strategy, *callbacks):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(X, X[:, :1], epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


@pytest.mark.parametrize("kind", ["alone", "strategy"])
def test_interrupted_training_continues_after_last_committed_epoch(tmp_path, kind):
    import tensorflow as tf

    strategy = tfdist.AllReduceStrategy() if kind == "strategy" else tf.distribute.get_strategy()
    expected = fit(strategy)
    place = tmp_path / "committed"
    with pytest.raises(KeyError, match="interrupted"):
        fit(strategy, tfdist.callbacks.CommitState(place), Ends())
    assert (place / "latest.weights.h5").exists()
    resumed = fit(strategy, tfdist.callbacks.CommitState(place))
    assert resumed.history.epoch == [2, 3]
    for variable, reference in zip(resumed.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), reference.numpy())
    assert not place.exists()


def test_files_are_kept_if_that_is_asked_for(tmp_path):
    import tensorflow as tf

    fit(tf.distribute.get_strategy(), tfdist.callbacks.CommitState(tmp_path, delete_checkpoint=False))
    assert (tmp_path / "latest.weights.h5").exists()
