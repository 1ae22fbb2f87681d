"""Agreement of all processes on the collectives that callbacks and data need in each step; others are left out.

A step of a small model takes less time than a collective. Where no callback acts on batches, and all processes know the
number of batches, they exchange only gradients in a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import MismatchError
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.data import datasets
from tfdist.strategies.keras.keras_agreement import DATA_OF_THEIR_OWN, by_value, first_array, listed
from tfdist.strategies.keras.keras_callbacks import WRITING
from tfdist.strategies.step_calls import StepCalls

_OF_STEPS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_WITH_LOGS = ("on_batch_end", "on_train_batch_end", "on_test_batch_end")


def install() -> None:
    """Installs the hooks, which have to be further in than those that compare the processes' arguments."""
    keras_hooks.add(StepCollectives)


class StepCollectives(keras_hooks.ModelHooks[DataParallel]):
    """Hooks that choose the collectives of steps: those that the callbacks of any process need."""

    ability = DataParallel

    def fit(self, call: TrainerCall) -> contextlib.AbstractContextManager[None] | None:
        """Agrees on the collectives of steps. All processes have been given data of the same kinds."""
        extended, given = self.extended, call.arguments
        if (
            call.is_within_fit
            or not extended.runs_in_lockstep
            or extended.is_local_only
            or not extended.has_several_replicas
        ):
            return None
        callbacks = listed(given["callbacks"])
        trains = call.name == "fit"
        needs = [trains and any(map(may_end_steps, callbacks)), trains and any(map(_begins_epochs, callbacks))]
        needs.append(any(map(reads_logs_of_steps, callbacks)))
        if len(extended.all_processes.members) > 1:
            needs = extended.all_processes.all_gather(tf.constant([needs])).numpy().any(axis=0)
        ends, begins, reads = map(bool, needs)
        data = given["x"], given.get("validation_data")
        may_differ = any(_may_have_other_samples(part, len(extended.all_processes.members)) for part in data)
        compares = extended.synchronizes_steps and may_differ and not ends
        calls = StepCalls(counts_batches=ends, compares_samples=compares, merges_logs=reads)
        return self._calling(calls, compares_begins=begins and not ends)

    evaluate = predict = fit

    @contextlib.contextmanager
    def _calling(self, calls: StepCalls, compares_begins: bool) -> Iterator[None]:
        extended, stopping = self.extended, self.extended.stopping
        before, extended.step_calls = extended.step_calls, calls
        compared, stopping.compares_begins = stopping.compares_begins, compares_begins
        samples = extended.shares.take_tally()
        try:
            yield
        finally:
            extended.step_calls, stopping.compares_begins = before, compared
            extended.shares.take_tally()
            extended.shares.tally(samples)

    def epoch_logs(self, call: TrainerCall) -> None:
        """Compares the epoch's numbers of samples of all processes, where steps have not counted them.

        Raises:
            MismatchError: processes had different numbers of samples.
        """
        extended = self.extended
        if not extended.step_calls.compares_samples or extended.is_local_only:
            return
        samples = str(extended.shares.take_tally())
        exchange = extended.all_processes
        for values in exchange.compare("the samples of an epoch", {"samples": samples}).values():
            raise MismatchError(
                f"rank {exchange.rank}: the batches of an epoch have different numbers of samples on different ranks: "
                f"{by_value(values, exchange.members)}. Give every rank the same data; each takes its share of each "
                f"batch. {DATA_OF_THEIR_OWN}"
            )


def calls_of(extended: DataParallel, data: Any) -> StepCalls:
    """Returns the collectives of the steps that read data, which all processes have agreed on.

    Args:
        extended: the strategy's `extended`.
        data: the argument ``x`` of `fit`, or such data for validation.
    """
    if not extended.synchronizes_steps:
        return StepCalls(counts_batches=False)
    if not extended.runs_in_lockstep:
        return StepCalls()
    if extended.is_local_only:
        return StepCalls(counts_batches=False, merges_logs=False)
    agreed, processes = extended.step_calls, len(extended.all_processes.members)
    if agreed.counts_batches or not _has_known_batches(data, processes):
        return StepCalls(merges_logs=agreed.merges_logs)
    compares = _may_have_other_samples(data, processes)
    return StepCalls(counts_batches=False, compares_samples=compares, merges_logs=agreed.merges_logs)


def _may_have_other_samples(data: Any, processes: int) -> bool:
    """Returns whether processes with the same number of batches may have different numbers of samples in them."""
    return first_array(data) is None and _has_known_batches(data, processes)


def _has_known_batches(data: Any, processes: int) -> bool:
    """Returns whether all processes have the same number of batches, once they have agreed on data."""
    if isinstance(data, datasets.SharedDataset):
        data = data.dataset
    if isinstance(data, tf.data.Dataset):
        has_length = int(data.cardinality()) != tf.data.UNKNOWN_CARDINALITY
        return has_length and datasets.is_cut_by_samples(data, processes)
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches is not None
    return first_array(data) is not None


def may_end_steps(callback: Any) -> bool:
    """Returns whether a callback may set ``stop_training`` after any step, because it has code that runs there.

    Of Keras's callbacks, this holds for `keras.callbacks.TerminateOnNaN`, and for a `keras.callbacks.LambdaCallback`
    with such functions.
    """
    return isinstance(callback, keras.callbacks.TerminateOnNaN) or _acts(callback, _OF_STEPS)


def _begins_epochs(callback: Any) -> bool:
    """Returns whether a callback may set ``stop_training`` before an epoch's first step."""
    return _acts(callback, ("on_epoch_begin",))


def reads_logs_of_steps(callback: Any) -> bool:
    """Returns whether a callback may read the logs of a step of `fit` or `evaluate`.

    Of Keras's callbacks, this holds for `keras.callbacks.TerminateOnNaN`, for a `keras.callbacks.LambdaCallback` with a
    function for ends of batches, and for those that write after some batches. The progress bar does not count: it shows
    its process's own logs until the epoch ends.
    """
    if isinstance(callback, keras.callbacks.TerminateOnNaN) or _acts(callback, _WITH_LOGS):
        return True
    after = getattr(callback, "save_freq", None) or getattr(callback, "update_freq", None)
    return isinstance(callback, WRITING) and after not in (None, "epoch")


def _acts(callback: Any, names: tuple[str, ...]) -> bool:
    """Returns whether a callback has code of the user for any of these methods of a callback."""
    for name in names:
        owner = next((kind for kind in type(callback).__mro__ if name in vars(kind)), None)
        is_known = owner is not None and owner.__module__.partition(".")[0] in ("keras", "tfdist")
        if not is_known or (name in vars(callback) and not isinstance(callback, WRITING)):
            return True
    return False
