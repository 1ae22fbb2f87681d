"""`fit` on batches that are dealt out to all workers, so that every sample of an epoch counts once."""

from __future__ import annotations

import contextlib
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
from tfdist.parameter_server.protocol.dealing import Rule
from tfdist.private import epochs, optimizers
from tfdist.private import tensorflow as private
from tfdist.private.keras import array_slicing, backend, tf_trainer, tree
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks
from tfdist.strategies.keras.keras_assignments import MERGED_BY
from tfdist.strategies.server_abilities import UpdatesOnServers
from tfdist.strategies.servers.chief_stream import ChiefStream, stream_of
from tfdist.strategies.servers.dealt_batches import Batches, Ticketed, dataset
from tfdist.strategies.servers.random_access import Source, source_of
from tfdist.tensors import to_array, unnumbered

log = logging.getLogger("tfdist")


@dataclass
class SharedFit:
    """Epochs and data that a call of `fit` shares with those of other workers.

    Attributes:
        epochs: epochs whose batches are dealt to this worker.
        source: source of the batches.
        has_all_logs: whether the logs of the last epoch cover all workers.
    """

    epochs: SharedEpochs
    source: Batches
    has_all_logs: bool = False


_of_models: dict[int, SharedFit] = {}
"""Shared data by `id` of the model, while its `fit` is under way."""


@Once
def install() -> None:
    """Installs the seams."""
    keras_hooks.add(SharedDataHooks)
    replace(tf_trainer.TFEpochIterator, "catch_stop_iteration", _allow_varying_epoch_length)


def shared_by(model: Any) -> SharedFit | None:
    """Returns what the call of `fit` under way shares with other workers.

    Args:
        model: a Keras model.

    Returns:
        The shared epochs and data; None if the model trains on this worker's own data.
    """
    return _of_models.get(id(model))


@contextlib.contextmanager
def refreshed_step(model: Any, ticket: Any) -> Iterator[None]:
    """Context of a step, in a graph or eagerly, that reads the newest variables if the step had to wait for its batch.

    Other workers have gone on in the meantime, without waiting for this one.

    Args:
        model: the Keras model that is trained.
        ticket: ticket of the batch, an int64 scalar; None if the batch was not dealt.
    """

    def refresh() -> np.int64:
        extended = current_strategy.of_model(model, UpdatesOnServers)
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
        lambda: host_call(refresh, [], tf.TensorSpec([], tf.int64), name="tfdist_read"),
        lambda: tf.constant(0, tf.int64),
    )
    with tf.control_dependencies([refreshed]):
        yield


def skip_batch_without_update(model: Any, ticket: Any) -> None:
    """Reports a batch as used up if its step made no update; called behind the step, in a graph or eagerly.

    Args:
        model: the Keras model that is trained.
        ticket: ticket of the batch, an int64 scalar.
    """

    def skip(ticket: np.ndarray, *updates: np.ndarray) -> np.int64:
        shared, extended = shared_by(model), current_strategy.of_model(model, UpdatesOnServers)
        links = extended.links(model) if extended is not None else []
        if shared is not None and all(link.last_ticket != int(ticket) for link in links):
            shared.epochs.skip(int(ticket))
        return np.int64(0)

    optimizer = getattr(model, "optimizer", None)
    counted = [
        candidate for candidate in (optimizer, getattr(optimizer, "inner_optimizer", None)) if candidate is not None
    ]
    # Reading what an update assigns orders this behind the update.
    counts = [optimizers.apply_count(candidate).value for candidate in counted]
    host_call(skip, [ticket, *counts], tf.TensorSpec([], tf.int64), name="tfdist_settle")


class SharedDataHooks(keras_hooks.ModelHooks[UpdatesOnServers]):
    """Hooks by which `fit` trains on batches that are dealt out, and `evaluate` reads its own data."""

    ability = UpdatesOnServers

    def fit(self, call: TrainerCall) -> contextlib.AbstractContextManager[None] | None:
        """Takes part in epochs whose batches are dealt, if the data can be dealt."""
        given = call.arguments
        if not self.extended.shares_data or not call.model.compiled:
            return None
        if given["validation_split"] and given["validation_data"] is None:
            (given["x"], given["y"], given["sample_weight"]), given["validation_data"] = (
                array_slicing.train_validation_split(
                    (given["x"], given["y"], given["sample_weight"]), validation_split=given["validation_split"]
                )
            )
            given["validation_split"] = 0.0
        source = _source(self.extended, given)
        if not isinstance(source, str):
            return self._taking_part(call.model, given, source)
        _say_once(
            self.extended,
            f"the data of `fit` are not dealt out to the workers: {source}. Each worker trains on all that it is "
            'given. To divide the data, use data="own" and `dataset.shard(strategy.size, strategy.rank)` on each '
            "worker.",
        )
        return None

    @contextlib.contextmanager
    def _taking_part(self, model: Any, given: dict[str, Any], source: Batches) -> Iterator[None]:
        seed = private.global_seed() if source.shuffle else None
        if seed is None and source.shuffle:
            seed = secrets.randbits(63)
        plan = source.plan(None if seed is None else seed & 0x7FFFFFFFFFFFFFFF)
        stream = source.stream if isinstance(source, ChiefStream) else None

        def when_idle() -> None:
            for link in self.extended.links(model):
                link.suspend()

        with self.extended.shared_epochs(plan, when_idle, stream) as epochs:
            _of_models[id(model)] = SharedFit(epochs, source)
            try:
                given["validation_batch_size"] = given["validation_batch_size"] or given["batch_size"]
                for name in ("y", "sample_weight", "batch_size", "class_weight", "steps_per_epoch"):
                    given[name] = None
                given["shuffle"] = False
                given["x"] = dataset(source, epochs.tickets, with_tickets=True)
                yield
            finally:
                del _of_models[id(model)]

    @contextlib.contextmanager
    def evaluate(self, call: TrainerCall) -> Iterator[None]:
        """Has each worker evaluate all of the data that it is given, also within `fit`."""
        shared = _of_models.pop(id(call.model), None)
        try:
            yield
        finally:
            if shared is not None:
                _of_models[id(call.model)] = shared

    def epoch_logs(self, call: TrainerCall) -> None:
        """Replaces the logs of a complete epoch by those of all workers, where Keras takes them from the metrics."""
        model, logs, shared = call.model, call.arguments["logs"], shared_by(call.model)
        if shared is not None and not model.stop_training:  # else others have not ended the epoch
            call.replace(lambda: _merge_logs(model, logs, shared))

    def symbolic_build(self, call: TrainerCall) -> None:
        """Gives Keras the shapes to build with, for which it would draw and drop a batch."""
        shared, iterator = shared_by(call.model), call.arguments["iterator"]
        if shared is not None and iterator is not None and _is_dealt(iterator):
            first = tree.map_structure(lambda part: part, shared.source.first())
            call.arguments.update(iterator=None, data_batch=first)


def _merge_logs(model: Any, logs: Any, shared: SharedFit) -> Any:
    variables = list({id(state): state for metric in model.metrics for state in metric.variables}.values())
    rules: list[Rule] = [_rule(variable) for variable in variables]
    names = [unnumbered(metric.name) for metric in model.metrics]
    own = [to_array(variable.value).copy() for variable in variables]
    arrays = shared.epochs.merged(own, rules, names)
    values = [tf.convert_to_tensor(array) for array in arrays]
    with backend.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
        results = tree.map_structure(tf.convert_to_tensor, model.get_metrics_result())
    # Of an epoch of long ago, or of before a restart of the servers, nobody has the others' metrics any more.
    is_forgotten = not shared.epochs.taken and all(map(np.array_equal, own, arrays))
    has_results = not logs or (isinstance(logs, dict) and logs.keys() == results.keys())
    shared.has_all_logs = has_results and not is_forgotten
    return results if has_results else logs


def _rule(variable: Any) -> Rule:
    rules: dict[str, Rule] = {"only_first_replica": "first", "mean": "mean", "max": "max", "min": "min"}
    return rules.get(getattr(variable, MERGED_BY, variable.aggregation), "sum")


def _source(extended: UpdatesOnServers, given: dict[str, Any]) -> Batches | str:
    """Returns the data of `fit` by index, else as the chief's stream; or the reason why they cannot be shared."""
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
            f"the chief reads the data of `fit`, and sends each batch to one worker: {source}. The data that other "
            "workers give `fit` are not read.",
        )
    return stream


def _say_once(extended: UpdatesOnServers, text: str) -> None:
    if text not in extended.reported:
        extended.reported.add(text)
        log.warning("tfdist: %s", text)


def _allow_varying_epoch_length(original: Callable[..., Any]) -> Callable[..., Any]:
    """Allows another number of batches in each epoch; Keras would warn, and expect as many in the next one."""

    def catch_stop_iteration(self: Any) -> Any:
        return _ending(self) if _is_dealt(self) else original(self)

    return catch_stop_iteration


@contextlib.contextmanager
def _ending(iterator: Any) -> Iterator[None]:
    try:
        yield
        iterator.tf_sync()
    except (StopIteration, tf.errors.OutOfRangeError):
        epochs.end_epoch(iterator)


def _is_dealt(iterator: Any) -> bool:
    return isinstance(epochs.spec_of(iterator), Ticketed)
