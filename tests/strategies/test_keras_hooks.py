"""Hooks for the models of strategies with an ability."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked
from tfdist.seams import trainer
from tfdist.strategies import abilities, divided_abilities, keras_hooks
from tfdist.strategies.keras import keras_seams

X = np.ones((4, 2), np.float32)


class Noting(keras_hooks.ModelHooks[abilities.Ability]):
    noted = ()

    def evaluate(self, call):
        type(self).noted += (self.extended,)


@pytest.fixture(autouse=True)
def restored_hooks(monkeypatch):
    keras_seams.install()  # whose hooks stay
    for name in ("provided", "kinds"):
        monkeypatch.setattr(trainer.points, name, list(getattr(trainer.points, name)))
    monkeypatch.setattr(Noting, "noted", ())


def evaluate(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.evaluate(X, X[:, :1], verbose=0)


@pytest.mark.parametrize(
    ("ability", "has_it"),
    [(abilities.Ability, True), (abilities.DataParallel, True), (divided_abilities.HasStages, False)],
)
def test_hooks_run_for_strategies_with_the_ability(ranks, monkeypatch, ability, has_it):
    strategy = Ranked(ranks(1).groups[0])
    monkeypatch.setattr(Noting, "ability", ability)
    keras_hooks.add(Noting)
    evaluate(strategy)
    assert Noting.noted == (strategy.extended,) * has_it


def test_hooks_do_not_run_for_tensorflow_strategies():
    keras_hooks.add(Noting)
    evaluate(tf.distribute.MirroredStrategy(["CPU:0"]))
    assert Noting.noted == ()
