"""Evaluation beside training: as long as others train a model, an evaluator evaluates its newest parameters."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import TfdistError
from tfdist.seams.once import Once
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.server_abilities import UpdatesOnServers

_LOOK_SECONDS = 1.0
"""Seconds between two checks whether the parameters have changed."""


class SidecarEvaluator:
    """Evaluator of a job with parameter servers, which evaluates a model again and again until the job is over.

    Like `tf.keras.utils.SidecarEvaluator` of Keras 2, but it reads parameter servers instead of checkpoints. No worker
    waits for it. Each evaluation reads one version of the parameters, and each version is evaluated at most once. The
    last evaluation reads the newest version that is available when training has ended.

    Example:
        >>> if tfdist.role() == "evaluator":
        ...     logs = tfdist.SidecarEvaluator(model, test_data).start()
        ... else:
        ...     model.fit(train_data)

    Args:
        model: a Keras model, made and compiled under `tfdist.ParameterServerStrategy`, as on the workers.
        data: inputs or a dataset, as ``x`` of `keras.Model.evaluate`; or a tuple of x, y and optional sample weights.
        max_evaluations: number of evaluations after which `start` returns; None for no limit.
        callbacks: Keras callbacks, of which `evaluate` calls ``on_test_begin`` and the like.
        evaluate: further arguments of `keras.Model.evaluate`, such as ``batch_size`` or ``steps``; ``verbose`` is 2 by
            default.

    Raises:
        TfdistError: this process is not an evaluator of a job with parameter servers.
        ValueError: ``max_evaluations`` is not a number from 1.
    """

    def __init__(
        self, model: Any, data: Any, max_evaluations: int | None = None, callbacks: Any = None, **evaluate: Any
    ) -> None:
        extended = current_strategy.of_model(model, UpdatesOnServers)
        if extended is None or not extended.observes:
            raise TfdistError(
                "SidecarEvaluator needs a model of tfdist.ParameterServerStrategy in an evaluator of a job with "
                'parameter servers, where tfdist.role() is "evaluator"; workers call fit'
            )
        if max_evaluations is not None and (
            not isinstance(max_evaluations, int) or isinstance(max_evaluations, bool) or max_evaluations < 1
        ):
            raise ValueError(f"max_evaluations must be a whole number of at least 1, or None; got {max_evaluations!r}")
        self._model = model
        self._extended = extended
        self._most = max_evaluations
        x, y, weights = data if isinstance(data, tuple) and len(data) == 3 else (*_pair(data), None)
        self._arguments = {"x": x, "y": y, "sample_weight": weights, "callbacks": callbacks, "verbose": 2, **evaluate}

    def start(self) -> list[dict[str, float]]:
        """Evaluates until the job is over, or ``max_evaluations`` are made.

        Returns:
            The logs of each evaluation; under ``"iterations"``, how many updates its parameters contain.

        Raises:
            PeerLostError: a parameter server has been away for too long.
        """
        evaluations: list[dict[str, float]] = []
        seen = -1
        while True:
            is_over = self._extended.over.is_set()
            try:
                if self._extended.version(self._model) != seen:
                    logs = self._model.evaluate(**self._arguments, return_dict=True)
                    seen = self._extended.version(self._model, reads=False)
                    evaluations.append({**logs, "iterations": seen})
            except TfdistError:
                if not evaluations or not self._extended.over.is_set():
                    raise
                return evaluations  # the servers have ended with the job
            if is_over or len(evaluations) == self._most:
                return evaluations
            self._extended.over.wait(_LOOK_SECONDS)


@Once
def install() -> None:
    """Installs the hook, around the others of `fit`, which do not apply where nothing trains."""
    keras_hooks.add(InsteadOfFit)


class InsteadOfFit(keras_hooks.ModelHooks[UpdatesOnServers]):
    """Hooks by which `fit` in an evaluator evaluates the validation data as long as others train."""

    ability = UpdatesOnServers

    def fit(self, call: TrainerCall) -> None:
        """Evaluates the validation data in place of training.

        Raises:
            TfdistError: there is no validation data.
        """
        if not self.extended.observes:
            return
        given = call.arguments
        if given["validation_data"] is None:
            raise TfdistError(
                "this task is an evaluator, which does not train: give fit validation_data=, which are evaluated here "
                "as long as others train; or call tfdist.SidecarEvaluator(model, data).start() or evaluate"
            )
        options = {
            "batch_size": given["validation_batch_size"] or given["batch_size"],
            "steps": given["validation_steps"],
            "verbose": 0 if given["verbose"] == 0 else 2,
        }
        evaluator = SidecarEvaluator(call.model, given["validation_data"], callbacks=given["callbacks"], **options)
        call.replace(lambda: _history(call.model, evaluator.start()))


def _history(model: Any, logs: list[dict[str, float]]) -> keras.callbacks.History:
    """Returns what `fit` returns: the history of the evaluations."""
    history = keras.callbacks.History()
    history.set_model(model)
    history.epoch = [int(evaluation["iterations"]) for evaluation in logs]
    for evaluation in logs:
        for name, value in evaluation.items():
            if name != "iterations":
                history.history.setdefault(f"val_{name}", []).append(value)
    return history


def _pair(data: Any) -> tuple[Any, Any]:
    return data if isinstance(data, tuple) and len(data) == 2 else (data, None)
