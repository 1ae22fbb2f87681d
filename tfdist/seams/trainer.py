"""The hook points of a model's trainer: where it is compiled, trained, evaluated, used and saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.private.keras import base_trainer, tf_trainer
from tfdist.seams.hooks import Context, HookPoints, Hooks, MethodCall


class TrainerCall(MethodCall):
    """A call of a method of a model."""

    @property
    def model(self) -> Any:
        """The model whose method is called."""
        return self.owner

    @property
    def is_within_fit(self) -> bool:
        """Whether `fit` makes this call to evaluate its validation data."""
        return bool(self.arguments.get("kwargs", {}).get("_use_cached_eval_dataset"))


class TrainerHooks(Hooks):
    """The hooks of a feature for one model's trainer; a method that is not overridden does nothing.

    A hook is called before the hooks and the method within it. It may change the call's arguments, replace the call, or
    return a context in which the call runs.
    """

    def compile(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.compile`."""

    def fit(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.fit`."""

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Returns the callbacks for `fit`; called by the `fit` hook of a strategy, from the outermost hooks inwards.

        Args:
            model: the model that is trained.
            given: the user's callbacks, as hooks further out have changed them.
        """
        return given

    def evaluate(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.evaluate`, which `fit` calls, too."""

    def predict(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.predict`."""

    def train_on_batch(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.train_on_batch`."""

    def test_on_batch(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.test_on_batch`."""

    def predict_on_batch(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.predict_on_batch`."""

    def symbolic_build(self, call: TrainerCall) -> Context:
        """Runs where a model may be built from ``data_batch``, or from a batch that is drawn from ``iterator``."""

    def make_function(self, call: TrainerCall) -> Context:
        """Runs where the function of ``step_function`` (`train_step` or `test_step`) is made."""

    def make_predict_function(self, call: TrainerCall) -> Context:
        """Runs where the function of `predict_step` is made, if there is none yet, or with ``force``."""

    def epoch_logs(self, call: TrainerCall) -> Context:
        """Runs where an epoch's logs are made from ``logs`` of the last step, before validation and callbacks."""

    def save(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.save`."""

    def save_weights(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.save_weights`."""

    def export(self, call: TrainerCall) -> Context:
        """Runs at `keras.Model.export`."""


_TRAINER = tf_trainer.TensorFlowTrainer
_USED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch")

points = HookPoints(
    TrainerHooks,
    {
        "compile": [(base_trainer.Trainer, "compile")],
        **{name: [(_TRAINER, name)] for name in _USED},
        "callbacks": [(_TRAINER, "fit")],
        "error": [(_TRAINER, name) for name in _USED],
        "predict_on_batch": [(_TRAINER, "predict_on_batch")],
        "symbolic_build": [(_TRAINER, "_maybe_symbolic_build")],
        "make_function": [(_TRAINER, "_make_function")],
        "make_predict_function": [(_TRAINER, "make_predict_function")],
        "epoch_logs": [(base_trainer.Trainer, "_get_metrics_result_or_logs")],
        "save": [(keras.Model, "save")],
        "save_weights": [(keras.Model, "save_weights")],
        "export": [(keras.Model, "export")],
    },
    call=TrainerCall,
)


class WithPredictStep:
    """A stand-in for a model, with another `predict_step`, from which Keras makes its predict function.

    Args:
        model: a Keras model.
        predict_step: function of a batch that returns predictions.
    """

    def __init__(self, model: Any, predict_step: Callable[..., Any]) -> None:
        self.__dict__.update(_model=model, predict_step=predict_step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)
