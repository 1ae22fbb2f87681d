import keras
import numpy as np
import pytest

from tests.strategies.ranked import on_ranks
from tfdist.errors import MismatchError
from tfdist.strategies.keras import keras_comparison

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def model_in(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="head")])
        model.compile("sgd", "mse")
    return model


def test_compare_returns_largest_number_if_weights_are_equal(ranks):
    def work(strategy):
        return keras_comparison.compare(model_in(strategy), strategy.extended, "now", largest=strategy.rank)

    assert on_ranks(ranks(3), work) == [2] * 3


@pytest.mark.parametrize("devices", [("CPU:0",), ("CPU:0", "CPU:1")])
def test_copies_that_differ_are_named(ranks, devices):
    """Rank 1 differs from the others, with one device for each rank and with two."""

    def work(strategy):
        model = model_in(strategy)
        if strategy.rank == 1:
            model.set_weights([weight + 1 for weight in model.get_weights()])
        with pytest.raises(
            MismatchError, match=r"now the ranks' weights are not equal: .*head/kernel .*rank\(s\) \[1\]"
        ):
            keras_comparison.compare(model, strategy.extended, "now")
        return True

    assert on_ranks(ranks(3), work, devices=devices) == [True] * 3


@pytest.mark.parametrize("checks", [True, False])
def test_evaluate_raises_on_unequal_weights_if_checked(ranks, checks):
    def work(strategy):
        model = model_in(strategy)
        if strategy.rank:
            model.set_weights([weight + 1 for weight in model.get_weights()])
        model.evaluate(X, Y, verbose=0)
        return True

    if checks:
        with pytest.raises(MismatchError, match="before evaluate"):
            on_ranks(ranks(2), work)
    else:
        assert on_ranks(ranks(2), work, checks_weights=False) == [True, True]


def test_unequal_weights_after_fit_raise(ranks):
    class Restores(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights([0 * weight for weight in self.model.get_weights()])

    def work(strategy):
        model_in(strategy).fit(X, Y, verbose=0, callbacks=[Restores()] * strategy.rank)

    with pytest.raises(MismatchError, match="after the training"):
        on_ranks(ranks(2), work)
