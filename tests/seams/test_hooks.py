"""Hooks at the points of a class, here of models of plain Keras: they note when they are called."""

import contextlib

import keras
import numpy as np
import pytest

from tfdist.seams import hooks, order, trainer

X = np.ones((4, 2), np.float32)
OUTER = "tfdist.pipeline.keras_pipelines"


def noting(noted, name):
    class Hooks(trainer.TrainerHooks):
        @contextlib.contextmanager
        def predict(self, call):
            noted.append(f"{name} begins")
            yield
            noted.append(f"{name} ends")

    return Hooks


def test_contexts_are_within_each_other_in_the_order_of_features(provided, model):
    noted = []
    provided(noting(noted, "inner"))
    provided(noting(noted, "outer"), OUTER)
    assert order.place_of("tfdist.strategies.keras.keras_steps") < order.place_of(OUTER)
    np.testing.assert_array_equal(model.predict(X, verbose=0), np.full((4, 1), 2.0))
    assert noted == ["outer begins", "inner begins", "inner ends", "outer ends"]
    assert [hook.rpartition(".")[0] for hook in trainer.points.standing()["TensorFlowTrainer.predict"]] == [
        "pipeline.keras_pipelines.noting.<locals>",
        "strategies.keras.keras_steps.noting.<locals>",
    ]
    assert trainer.points.standing()["TensorFlowTrainer.evaluate"] == []


def test_replacement_runs_inside_outer_hooks_and_can_call_inner(provided, model):
    noted = []

    class Instead(trainer.TrainerHooks):
        def predict(self, call):
            call.arguments["x"] = call.arguments["x"][:1]
            call.replace(lambda: noted.append("instead") or -call.inner())

    provided(Instead, "tfdist.strategies.servers.keras_servers")
    provided(noting(noted, "inner"))
    provided(noting(noted, "outer"), OUTER)
    np.testing.assert_array_equal(model.predict(X, verbose=0), [[-2.0]])
    assert noted == ["outer begins", "instead", "inner begins", "inner ends", "outer ends"]


def test_each_model_has_its_own_hooks_and_wrong_arguments_stay_errors(provided, model):
    noted = []
    other = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    provided(noting(noted, "own"), is_for=lambda candidate: candidate is model)
    other.predict(X, verbose=0)
    assert noted == []
    for keras_model in (model, other):
        with pytest.raises(TypeError, match=r"\.predict\(\) got an unexpected keyword argument 'rows'"):
            keras_model.predict(X, rows=3)


def test_errors_are_translated_from_innermost_to_outermost_hook(provided, model):
    class Telling(trainer.TrainerHooks):
        def error(self, error):
            return OSError(f"inner: {error}") if "told" in str(error) else None

    class TellingMore(trainer.TrainerHooks):
        def predict(self, call):
            raise ValueError(call.arguments["x"])

        def error(self, error):
            return KeyError(f"outer: {error}") if "other" in str(error) else None

    provided(Telling)
    provided(TellingMore, OUTER)
    with pytest.raises(OSError, match="inner: is told"):
        model.predict("is told")
    with pytest.raises(KeyError, match="outer: other"):
        model.predict("other")
    with pytest.raises(KeyError, match="outer: inner: other, told"):
        model.predict("other, told")
    with pytest.raises(ValueError, match=r"^as is$"):
        model.predict("as is")


def test_error_hook_translates_errors_of_all_methods(provided, model):
    class Telling(trainer.TrainerHooks):
        def error(self, error):
            return OSError(f"told: {error}")

    provided(Telling)
    for method in (model.train_on_batch, model.test_on_batch, model.fit, model.evaluate):
        with pytest.raises(OSError, match="told: "):
            method(X, X[:3])


def test_only_methods_with_hooks_are_replaced_once(provided, monkeypatch):
    replaced = []
    monkeypatch.setattr(trainer.points, "_replaced", set())
    monkeypatch.setattr(hooks, "replace", lambda owner, name, wrapper: replaced.append(name))
    provided(noting([], "one"))
    provided(noting([], "two"), OUTER)
    assert replaced == ["predict"]
