"""Keras steps on several replicas: each works on its share of the batch, and the results are merged afterwards."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.private.epochs import end_epoch
from tfdist.private.keras import backend, tf_trainer, tree
from tfdist.private.models import strategy_of
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall, WithPredictStep
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.data.datasets import SharedIterator
from tfdist.strategies.data.row_checks import fixed_rows, readable, rows_of_state
from tfdist.strategies.data.shares import Share, ShareWithOwnLogs, as_share, batch_size, static_rows, weighed
from tfdist.strategies.keras import keras_metrics
from tfdist.strategies.keras.derived_logs import DerivedLog, Source, derived
from tfdist.strategies.keras.keras_assignments import Assigned
from tfdist.strategies.keras.keras_variables import check_scope, level_counts
from tfdist.strategies.keras.state_of_steps import StateOfMetrics, StateOfStep


def install() -> None:
    """Installs the seams for steps."""
    keras_hooks.add(OnShares)
    replace(tf_trainer, "reduce_per_replica", _over_all_replicas)
    replace(tf_trainer.TFEpochIterator, "catch_stop_iteration", _ended_by_a_wish)


_last_steps: weakref.WeakKeyDictionary[Any, Step] = weakref.WeakKeyDictionary()
"""By strategy, the last step that was traced or run eagerly and whose logs are not yet merged."""

_taken: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Step]] = weakref.WeakKeyDictionary()
"""By strategy, the steps that have been taken."""


_MAKING = {"fit": "make_train_function", "evaluate": "make_test_function", "predict": "make_predict_function"}
"""By method of Keras, the method that makes the function of its steps."""

_made: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""By model, the names of those methods of `_MAKING` that have made functions on shares."""


def check_functions(model: Any, method: str) -> None:
    """Refuses a model that makes its own step functions, because these would get shares in place of batches.

    Args:
        model: a Keras model, trained on several replicas.
        method: "fit", "evaluate" or "predict".

    Raises:
        TypeError: the model makes its own step function for this method.
    """
    name = _MAKING[method]
    owner = next(kind for kind in type(model).__mro__ if name in vars(kind))
    if owner.__module__.partition(".")[0] == "keras":
        return
    getattr(model, name)()
    if name not in _made.get(model, ()):
        step = name.removeprefix("make_").replace("function", "step")
        raise TypeError(
            f"{owner.__name__}.{name} makes its own step function, which cannot take the shares of a batch that "
            f"replicas get. Override {step}(data) instead, which each replica calls on its share; or write your own "
            "loop around strategy.run."
        )


def step_of(logs: Any, extended: Any) -> Step | None:
    """Returns the step that has returned logs; None where a single replica trains, or none has been taken.

    Args:
        logs: logs as Keras passes them on; a callback may have evaluated, and so taken other steps, since.
        extended: the strategy's `extended`.
    """
    return next((step for step in _taken.get(extended, ()) if step.logs is logs), None)


class Step:
    """A Keras step function, called by every replica.

    The replica works on its share. An empty share holds a stand-in row with weight zero. The step returns logs, which
    `logs_of_all` turns into those of all replicas. Logs that are all results of metrics may be merged when the epoch
    ends instead.

    Args:
        model: a Keras model.
        extended: the `extended` of its strategy, with several replicas.
        function: the model's `train_step` or `test_step`.

    Attributes:
        model: as given.
        names_of_results: names of the logs that are results of metrics, or computed from such results, as a whole.
        logs: the logs that were returned last.
        has_own_logs: whether these are this process's own.
    """

    def __init__(self, model: Any, extended: DataParallel, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.model = model
        self._extended = extended
        self._function = function
        self._assigned = Assigned()
        self._results = keras_metrics.Results()
        self._kinds: list[Any] = []
        self.names_of_results: set[str] = set()
        self.logs: Any = None
        self._merges = True
        self.has_own_logs = False

    def __call__(self, data: Any) -> Any:
        """Takes the step on the calling replica's part of the batch, and returns its terms of the logs."""
        extended, model = self._extended, self.model
        self._merges = not isinstance(data, ShareWithOwnLogs)
        share = fixed_rows(as_share(data), rows_of_state(model))
        metrics = keras_metrics.all_metrics(model)
        with extended.shares.replica(share.rows, static_rows(share)), self._assigned.noted():
            kept = _unique(variable for metric in metrics for variable in metric.variables)
            of_metrics = StateOfMetrics(kept, extended.shares)
            of_layers = StateOfStep(model, extended, self._assigned)
            with self._results.of(metrics), of_layers.under_way():
                outputs = self._contributions(self._function(share.data))
            of_layers.merge()
            of_metrics.forget_stand_in(self._assigned)
        for variable in self._assigned.among(kept):
            keras_metrics.infer_merge_rule(variable, self._assigned.values.get(id(variable), []))
        _last_steps[extended] = self
        self._assigned.values.clear()
        return outputs

    def _contributions(self, outputs: Any) -> Any:
        """Returns this replica's terms of the logs of all replicas; records how to merge them."""
        self._kinds = []

        def contribution(path: Any, value: Any) -> Any:
            result = self._results.whose(value) or self._by_name(path, value) or derived(value, self._results.whose)
            if result is not None:
                self._kinds.append(result)
                return tf.constant(0)  # a placeholder: `logs_of_all` computes the result
            tensor = tf.convert_to_tensor(value)
            if not (tensor.dtype.is_floating or tensor.dtype.is_integer) or not tensor.shape.is_fully_defined():
                self._kinds.append("own")
                return tensor
            self._kinds.append(tensor.dtype)
            return weighed(tf.cast(tensor, tf.float64), self._extended.shares.weight())

        paths = tree.flatten_with_path(outputs)
        flat = [contribution(path, value) for path, value in paths]
        kinds = [
            (str(path[0]), _is_of_metrics(kind)) for (path, _), kind in zip(paths, self._kinds, strict=True) if path
        ]
        self.names_of_results = {name for name, _ in kinds} - {name for name, is_result in kinds if not is_result}
        return tree.pack_sequence_as(outputs, flat)

    def _by_name(self, path: Any, value: Any) -> tuple[Any, Any] | None:
        """Finds by name the metric of a result that comes from a user's `tf.function`, as its tensor is another one."""
        if not path or not tf.is_symbolic_tensor(value) or "PartitionedCall" not in value.op.type:
            return None
        for metric in keras_metrics.all_metrics(self.model):
            if metric.name == path[0] and self._assigned.among(metric.variables):
                return metric, tuple(path[1:])
        return None

    def logs_of_all(self, outputs: Any, extended: DataParallel) -> Any:
        """Returns the logs of the step over all replicas; in the cross-replica context.

        Results of metrics are computed from the merged state of all replicas, and from them what the step computes from
        results alone. Other numbers are means, weighted by samples.
        Any value that is neither a metric's result nor a number of known shape is this process's own.

        Args:
            outputs: the outputs of all local replicas, as the strategy returns them.
            extended: the strategy's `extended`.
        """
        flat = [extended._container_strategy().experimental_local_results(value) for value in tree.flatten(outputs)]
        numbers = [place for place, kind in enumerate(self._kinds) if isinstance(kind, tf.DType)]
        merges = extended.synchronizes_steps and (self._merges or not self._has_results_only)
        state, sums = keras_metrics.merged_beside(
            self._variables_of_results(),
            [tf.add_n(flat[place]) for place in numbers],
            extended,
            locally=not merges,
        )
        logs: list[Any] = [parts[0] for parts in flat]
        for place, total in zip(numbers, sums, strict=True):
            kind = self._kinds[place]
            logs[place] = tf.cast(total if kind.is_floating else tf.round(total), kind)
        return tree.pack_sequence_as(outputs, self._with_results(logs, state))

    @property
    def _has_results_only(self) -> bool:
        """Whether no log is a number of the step alone, which cannot be merged later."""
        return not any(isinstance(kind, tf.DType) for kind in self._kinds)

    def note(self, iterator: Any, logs: Any) -> None:
        """Notes the iterator that the last step has read, to know whether its logs are to be merged later.

        Args:
            iterator: iterator that the step's function was called with, such as a `SharedIterator`.
            logs: the logs that the function has returned.
        """
        self.logs = logs
        merges = not isinstance(iterator, SharedIterator) or iterator.merges_logs
        self.has_own_logs = not merges and self._has_results_only

    def merged(self, logs: Any) -> Any:
        """Merges the logs of an epoch's last step over all replicas; eagerly, and on all processes.

        Args:
            logs: logs of this process's replicas.
        """
        state = keras_metrics.merged(self._variables_of_results(), self._extended)
        return tree.pack_sequence_as(logs, self._with_results(tree.flatten(logs), state))

    def _variables_of_results(self) -> list[Any]:
        asked = _unique(metric for metric, _ in self._sources())
        return [variable for metric in asked for variable in metric.variables]

    def _sources(self) -> Iterator[Source]:
        """Yields the results of metrics that logs are, or are computed from."""
        for kind in self._kinds:
            if isinstance(kind, DerivedLog):
                yield from kind.sources
            elif isinstance(kind, tuple):
                yield kind

    def _with_results(self, logs: list[Any], state: Any) -> list[Any]:
        """Returns logs in which placeholders are replaced by the results of metrics with the given state."""
        results: dict[int, dict[Any, Any]] = {}
        with backend.StatelessScope(state_mapping=state):
            for metric in _unique(metric for metric, _ in self._sources()):
                result = tree.map_structure(tf.convert_to_tensor, metric.result())
                results[id(metric)] = dict(tree.flatten_with_path(result))

        def of_all(log: Any, kind: Any) -> Any:
            if isinstance(kind, DerivedLog):
                return kind.compute(*(results[id(metric)][path] for metric, path in kind.sources))
            return results[id(kind[0])][kind[1]] if _is_of_metrics(kind) else log

        return [of_all(log, kind) for log, kind in zip(logs, self._kinds, strict=True)]


def _is_of_metrics(kind: Any) -> bool:
    """Returns whether a log is a result of a metric, or computed from such results."""
    return isinstance(kind, tuple)  # a `Source`, or a `DerivedLog`


def _unique(objects: Any) -> list[Any]:
    return list({id(each): each for each in objects}.values())


class OnShares(keras_hooks.ModelHooks[DataParallel]):
    """Hooks that make the steps of several replicas work on shares of batches."""

    ability = DataParallel

    def make_function(self, call: TrainerCall) -> None:
        """Makes a function whose steps work on shares.

        Raises:
            ValueError: the model has state that was made outside the scope.
        """
        model, extended, step_function = call.model, self.extended, call.arguments["step_function"]
        check_scope(model)
        if not extended.has_several_replicas:
            return
        call.arguments["step_function"] = step = Step(model, extended, step_function)
        trains = inspect.unwrap(step_function) == model.train_step
        _made.setdefault(model, set()).add(_MAKING["fit" if trains else "evaluate"])
        call.replace(lambda: _on_shares(call.inner(), step, extended, trains))

    def epoch_logs(self, call: TrainerCall) -> None:
        """Merges the logs of the last step, unless they are merged already or Keras replaces them by metrics."""
        logs = call.arguments["logs"]
        step = step_of(logs, self.extended)
        if step is None or not step.has_own_logs or not logs:
            return

        def of_all() -> Any:
            results = call.inner()
            return step.merged(logs) if results is logs else results

        call.replace(of_all)

    def make_predict_function(self, call: TrainerCall) -> None:
        """Makes a function that predicts on shares."""
        if not self.extended.has_several_replicas:
            return
        model = call.arguments["self"]  # may be a stand-in for the model, with another step
        _made.setdefault(call.model, set()).add(_MAKING["predict"])

        def predict_step(data: Any) -> Any:
            share = fixed_rows(as_share(data), rows_of_state(model))
            return tree.map_structure(lambda output: _of_samples(output, share), model.predict_step(share.data))

        call.arguments["self"] = WithPredictStep(model, predict_step)
        call.replace(lambda: _predicting(model, call.inner))


def _on_shares(function: Callable[..., Any], step: Step, extended: DataParallel, trains: bool) -> Callable[..., Any]:
    def on_shares(iterator: Any) -> Any:
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            iterator = _of_own_data(iterator, extended)
        if trains:
            extended.stopping.check()
        with _readable_errors(), extended.stopping.step(trains):
            try:
                logs = function(iterator)
            except tf.errors.OutOfRangeError:
                level_counts(step.model)
                raise
        step.note(iterator, logs)
        _taken.setdefault(extended, weakref.WeakSet()).add(step)
        return logs

    return on_shares


def _predicting(model: Any, make: Callable[[], Any]) -> Callable[..., Any]:
    before = model.predict_function
    make()
    if (function := model.predict_function) is before:
        return before

    def predict_function(batches: Any) -> Any:
        with _readable_errors():
            return function(batches)

    model.predict_function = predict_function
    return predict_function


@contextlib.contextmanager
def _readable_errors() -> Iterator[None]:
    """Context that raises errors of the checks of rows in their readable version."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if (told := readable(error)) is None:
            raise
        raise told from None


def _ended_by_a_wish(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ends an epoch early without the warning of Keras, which would take the data for too short."""

    @contextlib.contextmanager
    def catch_stop_iteration(self: Any) -> Iterator[None]:
        extended = current_strategy.of_strategy(strategy_of(self), DataParallel)
        with original(self):
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError):
                if extended is None or not extended.stopping.ended_by_request:
                    raise
                extended.stopping.ended_by_request = False
                end_epoch(self)

    return catch_stop_iteration


def _of_own_data(batches: Any, extended: DataParallel) -> Iterator[Any]:
    """Yields batches that every process passes itself (`train_on_batch`): each local replica gets all rows."""
    for batch in batches:
        samples = batch_size(batch) * len(extended.worker_devices)
        extended.shares.set_total(extended.step_bridge.all_reduce([samples])[0])
        yield batch


def _over_all_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        sharing = current_strategy.of_strategy(strategy, DataParallel)
        if sharing is None or not sharing.has_several_replicas:
            return original(values, strategy, reduction)
        if reduction == "concat":
            return tree.map_structure(lambda value: _gathered(value, strategy, sharing), values)
        return _last_steps.pop(sharing).logs_of_all(values, sharing)

    return reduce_per_replica


def _gathered(value: Any, strategy: Any, extended: DataParallel) -> tf.Tensor:
    parts = strategy.experimental_local_results(value)
    if not all(isinstance(part, tf.Tensor) for part in parts):
        raise TypeError(f"predict gathers only dense outputs; got {type(parts[0]).__name__}. Return dense tensors.")
    parts = [tf.stack([part]) if part.shape.rank == 0 else part for part in parts]
    return extended.exchange.all_gather(tf.concat(parts, 0) if len(parts) > 1 else parts[0])


def _of_samples(output: Any, share: Share) -> Any:
    """Returns an output without the prediction for a stand-in row."""
    if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
        return output
    return output[: tf.where(share.rows > 0, tf.shape(output, out_type=tf.int64)[0], 0)]
