"""`fit` on batches that are dealt out to all workers, so that every sample of an epoch counts once."""

from __future__ import annotations

import contextlib
import inspect
import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.engine.host_calls import host_call
from tfdist.parameter_server.dealing.epochs import AFTER_PAUSE, SharedEpochs
from tfdist.parameter_server.dealing.messages import Rule
from tfdist.private.keras import array_slicing, backend, base_trainer, tf_trainer, tree
from tfdist.seams.registry import replace
from tfdist.strategies import at_work
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.abilities import UpdatesOnServers
from tfdist.strategies.chief_stream import ChiefStream, stream_of
from tfdist.strategies.dealt_batches import Batches, Ticketed, dataset
from tfdist.strategies.keras_variables import MERGED_BY
from tfdist.strategies.random_access import Source, source_of
from tfdist.tensors import to_array

log = logging.getLogger("tfdist")


@dataclass
class Shared:
    """What a call of `fit` shares with those of other workers.

    Attributes:
        epochs: deals this worker's batches to it.
        source: of the batches.
        has_all_logs: whether the logs of the last epoch are of all workers.
    """

    epochs: SharedEpochs
    source: Batches
    has_all_logs: bool = False


_of_models: dict[int, Shared] = {}
"""By `id` of the model, while its `fit` is under way."""


def install() -> None:
    """Installs the seams."""
    replace(tf_trainer.TensorFlowTrainer, "fit", _on_dealt_batches)
    replace(tf_trainer.TensorFlowTrainer, "evaluate", _on_own_data)
    replace(base_trainer.Trainer, "_get_metrics_result_or_logs", _of_all_workers)
    replace(tf_trainer.TensorFlowTrainer, "_maybe_symbolic_build", _built_from_the_first_batch)
    replace(tf_trainer.TFEpochIterator, "catch_stop_iteration", _of_any_length)


def of(model: Any) -> Shared | None:
    """What the call of `fit` under way shares.

    Args:
        model: a Keras model.

    Returns:
        None if the model trains on this worker's own data.
    """
    return _of_models.get(id(model))


@contextlib.contextmanager
def up_to_date(model: Any, ticket: Any) -> Iterator[None]:
    """Context of a step, in a graph or eagerly: its variables are the newest if it had to wait for its batch.

    Others have gone on meanwhile, and nobody has waited for this worker.

    Args:
        model: that is trained.
        ticket: of the batch, an int64 scalar; None if nobody dealt it.
    """

    def refresh() -> np.int64:
        extended = at_work.of_model(model, UpdatesOnServers)
        for link in extended.links(model) if extended is not None else []:
            link.refresh()
        return np.int64(0)

    if ticket is None:
        yield
        return
    has_waited = tf.bitwise.bitwise_and(ticket, tf.constant(AFTER_PAUSE, tf.int64)) != 0
    if tf.executing_eagerly():
        if has_waited:
            refresh()
        yield
        return
    refreshed = tf.cond(
        has_waited,
        lambda: host_call(refresh, [], tf.int64, name="tfdist_read"),
        lambda: tf.constant(0, tf.int64),
    )
    with tf.control_dependencies([refreshed]):
        yield


def settle(model: Any, ticket: Any) -> None:
    """Behind a step that may have made no update: its batch is used up then. In a graph, or eagerly.

    Args:
        model: that is trained.
        ticket: of the batch, an int64 scalar.
    """

    def skip(ticket: tf.Tensor, *updates: tf.Tensor) -> np.int64:
        shared, extended = of(model), at_work.of_model(model, UpdatesOnServers)
        links = extended.links(model) if extended is not None else []
        if shared is not None and all(link.last_ticket != int(ticket) for link in links):
            shared.epochs.skip(int(ticket))
        return np.int64(0)

    optimizer = getattr(model, "optimizer", None)
    counted = [one for one in (optimizer, getattr(optimizer, "inner_optimizer", None)) if one is not None]
    # Reading what an update assigns orders this behind the update.
    host_call(skip, [ticket, *(one.iterations.value for one in counted)], tf.int64, name="tfdist_settle")


def _on_dealt_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.of_model(self, UpdatesOnServers)
        if extended is None or not extended.shares_data or not self.compiled:
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if given["validation_split"] and given["validation_data"] is None:
            (given["x"], given["y"], given["sample_weight"]), given["validation_data"] = (
                array_slicing.train_validation_split(
                    (given["x"], given["y"], given["sample_weight"]), validation_split=given["validation_split"]
                )
            )
            given["validation_split"] = 0.0
        source = _source(extended, given)
        if isinstance(source, str):
            _say_once(
                extended,
                f"the data of `fit` are not dealt out to the workers: {source}. Each worker trains on all that it is "
                'given. Divide the data: data="own", and `dataset.shard(strategy.size, strategy.rank)` on each worker.',
            )
            return original(*call.args, **call.kwargs)
        seed = private.global_seed() if source.shuffle else None
        if seed is None and source.shuffle:
            seed = secrets.randbits(63)
        plan = source.plan(None if seed is None else seed & 0x7FFFFFFFFFFFFFFF)
        stream = source.stream if isinstance(source, ChiefStream) else None

        def when_idle() -> None:
            for link in extended.links(self):
                link.suspend()

        with extended.shared_epochs(plan, source.shuffle == "batch", when_idle, stream) as epochs:
            _of_models[id(self)] = Shared(epochs, source)
            try:
                given["validation_batch_size"] = given["validation_batch_size"] or given["batch_size"]
                for name in ("y", "sample_weight", "batch_size", "class_weight", "steps_per_epoch"):
                    given[name] = None
                given["shuffle"] = False
                given["x"] = dataset(source, epochs.tickets, with_tickets=True)
                return original(*call.args, **call.kwargs)
            finally:
                del _of_models[id(self)]

    return fit


def _on_own_data(original: Callable[..., Any]) -> Callable[..., Any]:
    """Each worker evaluates all of the data it is given, also within `fit`."""

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared = _of_models.pop(id(self), None)
        try:
            return original(self, *args, **kwargs)
        finally:
            if shared is not None:
                _of_models[id(self)] = shared

    return evaluate


def _of_all_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Logs of an epoch are of all workers, where Keras takes them from the metrics and the epoch has ended."""

    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        shared = of(self)
        if shared is None or self.stop_training:  # others have not ended the epoch
            return original(self, logs)
        variables = list({id(one): one for metric in self.metrics for one in metric.variables}.values())
        rules: list[Rule] = [_rule(variable) for variable in variables]
        arrays = shared.epochs.merged([to_array(variable.value) for variable in variables], rules)
        values = [tf.convert_to_tensor(array) for array in arrays]
        with backend.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            results = tree.map_structure(tf.convert_to_tensor, self.get_metrics_result())
        shared.has_all_logs = not logs or (isinstance(logs, dict) and logs.keys() == results.keys())
        return results if shared.has_all_logs else logs

    return _get_metrics_result_or_logs


def _rule(variable: Any) -> Rule:
    rules: dict[str, Rule] = {"only_first_replica": "first", "mean": "mean", "max": "max", "min": "min"}
    return rules.get(getattr(variable, MERGED_BY, variable.aggregation), "sum")


def _source(extended: UpdatesOnServers, given: dict[str, Any]) -> Batches | str:
    """The data that `fit` was given: by index, else as the chief's stream; or why they cannot be shared."""
    names = ("x", "y", "sample_weight", "batch_size", "shuffle", "class_weight", "steps_per_epoch")
    if extended.is_sharing:
        return "another call of fit in this process shares data at the moment"
    arguments = {name: given[name] for name in names}
    steps = given["steps_per_epoch"]
    source: Batches | str
    if most := getattr(keras.config, "max_steps_per_epoch", lambda: None)():
        source = "keras.config limits the steps of an epoch"
        arguments["steps_per_epoch"] = min(most, steps or most)
    else:
        source = source_of(**arguments)
        if isinstance(source, Source) and steps is not None and steps != source.batches:
            source = f"steps_per_epoch is {steps}, but the data have {source.batches} batches"
    if not isinstance(source, str):
        return source
    stream = stream_of(**arguments)
    if not isinstance(stream, str):
        _say_once(
            extended,
            f"the chief reads the data of `fit`, and sends each batch to one worker: {source}. What other workers "
            "give `fit` is not read.",
        )
    return stream


def _say_once(extended: UpdatesOnServers, text: str) -> None:
    if text not in extended.reported:
        extended.reported.add(text)
        log.warning("tfdist: %s", text)


def _built_from_the_first_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras would draw a batch to learn its shapes, and drop it."""

    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        shared = of(self)
        if shared is None or iterator is None or not _is_dealt(iterator):
            return original(self, iterator=iterator, data_batch=data_batch)
        return original(self, data_batch=tree.map_structure(lambda part: part, shared.source.first()))

    return _maybe_symbolic_build


def _of_any_length(original: Callable[..., Any]) -> Callable[..., Any]:
    """Each epoch has another number of batches on each worker; Keras would warn, and expect as many in the next one."""

    def catch_stop_iteration(self: Any) -> Any:
        return _ending(self) if _is_dealt(self) else original(self)

    return catch_stop_iteration


@contextlib.contextmanager
def _ending(iterator: Any) -> Iterator[None]:
    try:
        yield
        iterator.tf_sync()
    except (StopIteration, tf.errors.OutOfRangeError):
        iterator._current_iterator = None
        iterator.data_adapter.on_epoch_end()


def _is_dealt(iterator: Any) -> bool:
    return isinstance(getattr(iterator._distributed_dataset, "element_spec", None), Ticketed)
