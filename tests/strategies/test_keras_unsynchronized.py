import weakref

import keras
import numpy as np
import pytest

from tests.strategies.ranked import Ranked
from tests.strategies.served import served
from tfdist.private.keras import tf_trainer
from tfdist.seams import trainer
from tfdist.strategies import keras_unsynchronized
from tfdist.strategies.keras import keras_seams

X = np.ones((4, 2), np.float32)


@pytest.fixture
def warning(monkeypatch):
    """As after `tfdist.init`, where an earlier test may have installed it; no later test has its hooks."""
    keras_seams.install()
    for name in ("provided", "kinds"):
        monkeypatch.setattr(trainer.points, name, list(getattr(trainer.points, name)))
    installed = keras_unsynchronized.warn_in_fit
    monkeypatch.setattr(installed, "is_done", installed.is_done)
    monkeypatch.setattr(keras_unsynchronized, "_strategies", weakref.WeakSet())
    installed()


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def fit(kind=keras.Sequential):
    model = kind([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model.fit(X, X[:, :1], epochs=2, verbose=0)


@pytest.mark.usefixtures("warning")
def test_fit_of_one_process_is_warned_of(caplog):
    """And trains as it does."""
    assert fit().epoch == [0, 1]
    assert caplog.text.count("this fit trains on this process alone") == 1
    assert "with tfdist.AllReduceStrategy().scope():" in caplog.text


@pytest.mark.usefixtures("warning")
def test_custom_train_step_does_not_warn(caplog):
    fit(OwnStep)
    assert "tfdist" not in caplog.text


@pytest.mark.usefixtures("warning")
def test_fit_under_a_strategy_does_not_warn(caplog, ranks):
    with Ranked(ranks(1).groups[0]).scope():
        fit()
    assert "alone" not in caplog.text


@pytest.mark.usefixtures("warning")
def test_warning_is_installed_once():
    before = len(trainer.points.provided)
    keras_unsynchronized.warn_in_fit()
    assert len(trainer.points.provided) == before
    assert tf_trainer.TensorFlowTrainer.fit.__name__ == "fit"


@pytest.mark.usefixtures("warning")
def test_a_model_that_was_made_outside_of_the_scope_is_named_once(caplog, ranks):
    """Also if it has a step of its own, as long as the strategy is there; a model in the scope is not."""
    strategy = Ranked(ranks(1).groups[0])
    strategy.size = 2
    keras_unsynchronized.warn_outside_of(strategy)
    with strategy.scope():
        fit()
    assert "outside of the scope" not in caplog.text
    model = OwnStep([keras.layers.Input((2,)), keras.layers.Dense(1)], name="teacher")
    model.compile("sgd", "mse")
    for _ in range(2):
        model.fit(X, X[:, :1], verbose=0)
    assert caplog.text.count("the model teacher was made outside of the scope of Ranked: this process trains it") == 1
    caplog.clear()
    strategy.size = 1
    keras_unsynchronized.warn_outside_of(object.__new__(Ranked))  # which was never made
    fit(OwnStep)
    assert "outside of the scope" not in caplog.text


@pytest.mark.usefixtures("warning")
def test_a_single_worker_of_servers_trains_alone_outside_of_the_scope(caplog):
    with served() as (strategy,):
        keras_unsynchronized.warn_outside_of(strategy)
        fit()
    assert "was made outside of the scope of Served" in caplog.text
    assert "AllReduceStrategy" not in caplog.text
