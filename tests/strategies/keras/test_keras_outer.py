"""The states of outer optimizers beside files, on one process and on ranks that are threads."""

import keras
import numpy as np
import pytest

import tfdist
from tests.strategies.ranked import RankedLocal
from tests.sweeps import sweep
from tfdist.local_sgd.intervals import Every
from tfdist.local_sgd.rounds import Settings
from tfdist.local_sgd.rules import Averaging, Outer
from tfdist.local_sgd.streaming import Streaming
from tfdist.strategies.keras import keras_outer

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def momentum_strategy(**arguments):
    return tfdist.LocalSGDStrategy(**{"sync_every": 2, "rule": Outer(outer()), **arguments})


def model_in(strategy, momentum=0.5, builds=True):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        optimizer = keras.optimizers.SGD(0.05, momentum=momentum)
        model.compile(optimizer, "mse", run_eagerly=True)  # what is tested are files
        if builds:
            model.optimizer.build(model.trainable_variables)
    return model


def fit(model, epochs=1):
    model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model


STREAMED = {"sync_every": 4, "streaming": Streaming(2, delay=1)}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({}, "a.keras"), (STREAMED, "a.weights.h5"), sweep({}, "a.weights.h5"), sweep(STREAMED, "a.keras")],
)
def test_training_goes_on_as_if_it_had_not_ended(tmp_path, arguments, name):
    path = tmp_path / name
    expected = fit(fit(model_in(momentum_strategy(**arguments))))
    first, again = fit(model_in(momentum_strategy(**arguments))), momentum_strategy(**arguments)
    if name == "a.keras":
        first.save(path)
        with again.scope():
            model = keras.models.load_model(path)
    else:
        first.save_weights(path)
        model = model_in(again)
        model.load_weights(path)
    fit(model)
    for weight, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-6)


def test_load_weights_restores_outer_state_for_an_optimizer_without_slots_that_is_not_built(tmp_path):
    """Keras restores its count of steps, too."""
    path = tmp_path / "a.weights.h5"
    expected = fit(model_in(momentum_strategy(), momentum=0.0), epochs=2)
    fit(model_in(momentum_strategy(), momentum=0.0)).save_weights(path)
    model = model_in(momentum_strategy(), momentum=0.0, builds=False)
    model.load_weights(path)
    fit(model)
    for weight, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-6)


def test_load_weights_restores_outer_state_during_training(tmp_path):
    path = tmp_path / "a.weights.h5"
    model = fit(model_in(momentum_strategy()))
    model.save_weights(path)
    (before,) = model.distribute_strategy.extended.outer_states(model)
    fit(model)
    (between,) = model.distribute_strategy.extended.outer_states(model)
    assert any((array != other).any() for array, other in zip(before[0], between[0], strict=True))
    model.load_weights(path)
    (after,) = model.distribute_strategy.extended.outer_states(model)
    for array, other in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(array, other)


def test_momentum_begins_anew_with_weights_that_were_saved_without_it(tmp_path):
    """Before the first round, by plain Keras, or beside another file's states."""
    path = tmp_path / "a.weights.h5"
    model = model_in(momentum_strategy())
    model.save_weights(path)
    assert not (tmp_path / "a.weights.h5.outer.npz").exists()
    first = fit(model).get_weights()
    model.load_weights(path)
    for weight, expected in zip(fit(model).get_weights(), first, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5)


def test_states_beside_other_weights_are_ignored_with_warning(tmp_path, caplog):
    path, other = tmp_path / "a.weights.h5", tmp_path / "b.weights.h5"
    model = model_in(momentum_strategy())
    model.save_weights(other)
    first = fit(model).get_weights()
    model.save_weights(path)
    other.replace(path)
    model.load_weights(path)
    assert "a.weights.h5.outer.npz belongs to other weights than were loaded" in caplog.text
    for weight, expected in zip(fit(model).get_weights(), first, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5)


def test_saving_without_outer_optimizer_removes_old_state_file(tmp_path):
    path = tmp_path / "a.weights.h5"
    fit(model_in(momentum_strategy())).save_weights(path)
    assert (tmp_path / "a.weights.h5.outer.npz").exists()
    fit(model_in(tfdist.LocalSGDStrategy(sync_every=2))).save_weights(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": Outer(keras.optimizers.Adam(0.1))}, "variables of the shapes"),
        ({"streaming": Streaming(2)}, "training goes on without them"),
        ({"rule": Averaging()}, "Averaging has no state"),
    ],
)
def test_incompatible_outer_states_are_ignored_with_warning(tmp_path, caplog, arguments, message):
    path = tmp_path / "a.weights.h5"
    fit(model_in(momentum_strategy())).save_weights(path)
    model = model_in(momentum_strategy(**arguments))
    model.load_weights(path)
    fit(model)
    assert message in caplog.text


def test_unreadable_outer_state_file_is_ignored_with_warning(tmp_path, caplog):
    path = tmp_path / "a.weights.h5"
    model = fit(model_in(momentum_strategy()))
    model.save_weights(path)
    (tmp_path / "a.weights.h5.outer.npz").write_bytes(b"nonsense")
    model.load_weights(path)
    assert "does not contain states of outer optimizers" in caplog.text


def test_one_rank_reads_for_all(ranks, tmp_path):
    def work(group):
        def made():
            return RankedLocal(group, Settings(Every(2), lambda: Outer(outer())))

        model = model_in(first := made())
        fit(model)
        path = tmp_path / f"{group.rank}"
        keras_outer.save(model, first.extended, path)
        again = model_in(second := made())
        again.set_weights(model.get_weights())
        keras_outer.restore(again, second.extended, path)
        fit(again)  # whose rounds begin with what was restored
        steps = int(second.extended.outer_states(again)[0][0][0])
        return path.with_name(f"{path.name}.outer.npz").exists(), steps

    assert ranks(2)(work) == [(True, 6), (False, 6)]


def test_all_reduce_strategy_saves_no_outer_state(tmp_path):
    strategy = tfdist.AllReduceStrategy()
    model = model_in(strategy)
    keras_outer.save(model, strategy.extended, tmp_path / "a")
    keras_outer.restore(model, strategy.extended, tmp_path / "a")
    assert not list(tmp_path.iterdir())
