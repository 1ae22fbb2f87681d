"""Processes agree on what callbacks and data need in each step, and leave out the other collectives.

A step of a small model takes less time than a collective. Where no callback acts on batches, and all know how many
batches there are, gradients are the only thing that processes exchange in a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import MismatchError
from tfdist.seams.trainer import ModelCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.data import datasets
from tfdist.strategies.keras.keras_agreement import DATA_OF_THEIR_OWN, by_value, first_array, listed
from tfdist.strategies.keras.keras_callbacks import WRITING
from tfdist.strategies.step_calls import StepCalls

_WITHIN_EPOCHS = ("on_epoch_begin", "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_WITH_LOGS = ("on_batch_end", "on_train_batch_end", "on_test_batch_end")


def install() -> None:
    """Installs the hooks. They have to be inside those that compare what processes are given."""
    keras_hooks.add(Needed)


class Needed(keras_hooks.ModelHooks[DataParallel]):
    """Steps have the collectives that the callbacks of any process need."""

    ability = DataParallel

    def fit(self, call: ModelCall) -> contextlib.AbstractContextManager[None] | None:
        """Agrees on them. All have been given data of the same kinds."""
        extended, given = self.extended, call.arguments
        if call.is_within_fit or not extended.acts_alike or extended.is_local_only or not extended.has_several_replicas:
            return None
        callbacks = listed(given["callbacks"])
        needs = [call.name == "fit" and any(map(may_end_steps, callbacks)), any(map(reads_logs_of_steps, callbacks))]
        if len(extended.everyone.members) > 1:
            needs = extended.everyone.all_gather(tf.constant([needs])).numpy().any(axis=0)
        ends, reads = map(bool, needs)
        may_differ = any(map(_may_have_other_samples, (given["x"], given.get("validation_data"))))
        calls = StepCalls(counts_batches=ends, compares_samples=may_differ and not ends, merges_logs=reads)
        return self._calling(calls)

    evaluate = predict = fit

    @contextlib.contextmanager
    def _calling(self, calls: StepCalls) -> Iterator[None]:
        extended = self.extended
        before, extended.step_calls = extended.step_calls, calls
        samples = extended.shares.take_tally()
        try:
            yield
        finally:
            extended.step_calls = before
            extended.shares.take_tally()
            extended.shares.tally(samples)

    def epoch_logs(self, call: ModelCall) -> None:
        """Compares how many samples the epoch had, where no step has.

        Raises:
            MismatchError: processes had different numbers.
        """
        extended = self.extended
        if not extended.step_calls.compares_samples or extended.is_local_only:
            return
        samples = str(extended.shares.take_tally())
        exchange = extended.everyone
        for values in exchange.compare("the samples of an epoch", {"samples": samples}).values():
            raise MismatchError(
                f"rank {exchange.rank}: the batches of an epoch have different numbers of samples on different ranks: "
                f"{by_value(values, exchange.members)}. Every process reads the same data, and takes its share of each "
                f"batch. {DATA_OF_THEIR_OWN}"
            )


def calls_of(extended: DataParallel, data: Any) -> StepCalls:
    """The collectives of the steps that read data, which all processes have agreed on.

    Args:
        extended: the strategy's `extended`.
        data: as of the argument ``x`` of `fit`.
    """
    if not extended.meets_in_steps or not extended.acts_alike:
        return StepCalls()
    if extended.is_local_only:
        return StepCalls(counts_batches=False, merges_logs=False)
    agreed = extended.step_calls
    if agreed.counts_batches or not _has_known_batches(data):
        return StepCalls(merges_logs=agreed.merges_logs)
    return StepCalls(
        counts_batches=False, compares_samples=_may_have_other_samples(data), merges_logs=agreed.merges_logs
    )


def _may_have_other_samples(data: Any) -> bool:
    """Whether batches, of which all processes have the same number, may have other numbers of samples on each."""
    return first_array(data) is None and _has_known_batches(data)


def _has_known_batches(data: Any) -> bool:
    """Whether all processes have the same number of batches, once they have agreed on data."""
    if isinstance(data, datasets.SharedDataset):
        data = data.dataset
    if isinstance(data, tf.data.Dataset):
        return datasets.is_cut_by_samples(data) and int(data.cardinality()) != tf.data.UNKNOWN_CARDINALITY
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches is not None
    return first_array(data) is not None


def may_end_steps(callback: Any) -> bool:
    """Whether a callback may set ``stop_training`` in the middle of an epoch: whether it does something there.

    Of Keras's own, only `keras.callbacks.TerminateOnNaN` and what a `keras.callbacks.LambdaCallback` calls do.
    """
    return isinstance(callback, keras.callbacks.TerminateOnNaN) or _acts(callback, _WITHIN_EPOCHS)


def reads_logs_of_steps(callback: Any) -> bool:
    """Whether a callback may read the logs of a step of `fit` or `evaluate`.

    Of Keras's own, those do that look at each batch, or that write after some. The progress bar shows what its process
    has until the epoch ends.
    """
    if isinstance(callback, keras.callbacks.TerminateOnNaN) or _acts(callback, _WITH_LOGS):
        return True
    after = getattr(callback, "save_freq", None) or getattr(callback, "update_freq", None)
    return isinstance(callback, WRITING) and after not in (None, "epoch")


def _acts(callback: Any, names: tuple[str, ...]) -> bool:
    """Whether a user's code is called at any of some points of a training."""
    for name in names:
        owner = next((kind for kind in type(callback).__mro__ if name in vars(kind)), None)
        is_known = owner is not None and owner.__module__.partition(".")[0] in ("keras", "tfdist")
        if not is_known or (name in vars(callback) and not isinstance(callback, WRITING)):
            return True
    return False
