"""Compares the weights and optimizer state of all processes, which `fit` keeps equal."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import MismatchError
from tfdist.private import tensorflow as private
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras.keras_optimizers import accumulators


def install() -> None:
    """Installs the hook, which has to be further in than those that make weights equal before `evaluate`."""
    keras_hooks.add(WeightComparison)


class WeightComparison(keras_hooks.ModelHooks[DataParallel]):
    """The hook that checks, before the user's `evaluate`, that all processes have the same model."""

    ability = DataParallel

    def evaluate(self, call: TrainerCall) -> None:
        """Compares the weights of all processes."""
        if self.extended.checks_weights and not call.is_within_fit:
            compare(call.model, self.extended, "before evaluate")


def compare(model: Any, extended: DataParallel, when: str, largest: int = 0) -> int:
    """Compares all devices' and processes' copies of weights and optimizer state, by hashes; all processes call it.

    Args:
        model: a Keras model.
        extended: the strategy's `extended`.
        when: the time of the comparison, for the message.
        largest: a number of this process, at least 0, whose maximum is found in the same collective.

    Returns:
        The largest of the numbers of all processes.

    Raises:
        MismatchError: copies are not equal.
    """
    if not extended.has_several_replicas:
        return largest
    variables = _compared(model, extended)
    hashes = _hashes(variables)
    # One all-reduce by maximum yields the maximum and, from the negatives, the minimum: both agree if all copies do.
    numbers = np.array([largest, *map(max, hashes), *(-min(row) for row in hashes)], np.int64)
    maxima = extended.bridge.all_reduce([tf.constant(numbers)], combine=np.maximum)[0].numpy()
    differs = maxima[1 : 1 + len(hashes)] != -maxima[1 + len(hashes) :]
    if differs.any():
        place = int(differs.argmax())
        _raise_mismatch(extended, when, variables[place], hashes[place])
    return int(maxima[0])


def _compared(model: Any, extended: DataParallel) -> list[Any]:
    """Returns the model's weights and the optimizer's state, without variables that differ between replicas."""
    if not extended.checks_weights:
        return []
    optimizer = model.optimizer
    kept = [] if optimizer is None else optimizer.variables
    excluded = {id(variable) for variable in accumulators(optimizer)}
    excluded.update(id(variable) for variable in extended.per_process_variables(model))
    everything = [*model.weights, *(variable for variable in kept if id(variable) not in excluded)]
    return [candidate for candidate in everything if extended.holds(model, candidate)]


def _hashes(variables: list[Any]) -> list[list[int]]:
    """Returns the hash of each copy of each variable."""
    return [[checksum(copy.numpy()) for copy in private.copies(variable.value)] for variable in variables]


def _raise_mismatch(extended: DataParallel, when: str, variable: Any, hashes: list[int]) -> None:
    everyone = extended.exchange.all_gather(tf.constant([hashes], tf.int64)).numpy()
    group = extended.group
    others = [rank for rank, theirs in zip(group.members, everyone, strict=True) if (theirs != everyone[0]).any()]
    where = f"between rank {group.members[0]} and rank(s) {others}" if others else "between the devices of a rank"
    raise MismatchError(
        f"rank {group.members[group.rank]}: {when} the ranks' weights are not equal: "
        f"{variable.path} differs {where}. Weights or optimizer state were changed on some ranks only, for example "
        "by a callback that depends on a rank's own values, or by an assignment in a custom train_step. To skip "
        "this check, make the strategy with check_weights=False."
    )


def checksum(value: np.ndarray) -> int:
    """Returns a number that differs for other values, at least 0 and below 2³²."""
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
