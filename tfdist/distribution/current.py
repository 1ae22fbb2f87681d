"""The distribution that is set: its strategy, and the models that train under it.

| seam | why |
|---|---|
| `global_state.set_global_attribute` | `set_distribution`, under any name, and `Distribution.scope` call it |
| `fit` and the like | a model or optimizer that was made before has no part; data may be divided already |
| `BatchNormalization._moments` | a batch is one: its moments are those of all processes' rows |
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.schedule import partition
from tfdist.distribution import devices, layouts
from tfdist.private import distributions as private
from tfdist.private import models, optimizers
from tfdist.private.keras import distributions, global_state, tree
from tfdist.seams import trainer
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.strategies.all_reduce.all_reduce import AllReduceStrategy

log = logging.getLogger("tfdist")

_BATCH = {"x", "y", "sample_weight"}
"""Arguments of `train_on_batch` that have a row for each sample."""
_MADE = "_tfdist_made"
"""Attribute of a distribution that holds its strategy."""


class DistributionStrategy(AllReduceStrategy):
    """The strategy of a distribution. It is None in a copy of that, which gets a strategy of its own."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@dataclass
class Settings:
    """Settings of `tfdist.enable_keras_distribution`.

    Args:
        strict: whether it is an error that no key of a `LayoutMap` matches.
    """

    strict: bool = False


settings = Settings()


@Once
def install() -> None:
    """Installs the seams, once."""
    replace(global_state, "set_global_attribute", _with_strategy)
    replace(keras.layers.BatchNormalization, "_moments", _of_whole_batches)
    trainer.points.provide([InDistribution], lambda model: [] if _current() is None else [InDistribution()])


def strategy_of(distribution: Any) -> DistributionStrategy:
    """Returns the strategy of a distribution, which is made once. All processes call this.

    Args:
        distribution: a `keras.distribution.Distribution`.

    Raises:
        ValueError: its mesh does not consist of this job's devices.
    """
    strategy: DistributionStrategy | None = getattr(distribution, _MADE, None)
    if strategy is None:
        strategy = _made_for(distribution)
        setattr(distribution, _MADE, strategy)
        private.leave_data_alone(distribution)
    return strategy


def _made_for(distribution: Any) -> DistributionStrategy:
    own = devices.of_mesh(distribution.device_mesh)
    if isinstance(distribution, distributions.DataParallel):
        return DistributionStrategy(devices=own)
    if own is not None and len(own) > 1:
        log.warning(
            "tfdist: keras.distribution: weights are whole on each device of a process. To divide them, start a "
            "process for each: tfdist run -n %d.",
            len(own),
        )
        return DistributionStrategy(devices=own)
    strategy = DistributionStrategy(devices=own, shard="weights")
    strategy.extended.divides = lambda variable: layouts.divides(distribution, variable)
    return strategy


def _of_whole_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Takes moments as with ``synchronized=True``, which stays out of the layer's configuration."""

    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        if not isinstance(tf.distribute.get_strategy(), DistributionStrategy):
            return original(self, inputs, mask)
        before, self.synchronized = self.synchronized, True
        try:
            return original(self, inputs, mask)
        finally:
            self.synchronized = before

    return _moments


def _with_strategy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sets the strategy of a distribution with the distribution itself."""

    def set_global_attribute(name: str, value: Any) -> None:
        if name == distributions.GLOBAL_ATTRIBUTE_NAME:
            _set(value)
        original(name, value)

    return set_global_attribute


def _set(distribution: Any) -> None:
    if distribution is not None and not isinstance(distribution, distributions.Distribution):
        raise TypeError(
            f"keras.distribution.set_distribution takes a DataParallel, a ModelParallel or None; got {distribution!r}"
        )
    before = _current()
    _leave(None if distribution is None else type(distribution).__name__)
    try:
        tf.distribute.experimental_set_strategy(None if distribution is None else strategy_of(distribution))
    except BaseException:
        tf.distribute.experimental_set_strategy(None if before is None else strategy_of(before))
        raise


def _leave(what: str | None) -> None:
    """Leaves the current strategy, so that a new one's variables are not its own."""
    standing = tf.distribute.get_strategy()
    try:
        tf.distribute.experimental_set_strategy(None)
    except RuntimeError as error:
        raise RuntimeError(
            f"keras.distribution.set_distribution({what}) within the scope of {type(standing).__name__}. Set the "
            "distribution outside of `with strategy.scope():`; it needs no such scope."
        ) from error


def _current() -> Any:
    return distributions.distribution()


class InDistribution(trainer.TrainerHooks):
    """The hooks of models that are used while a distribution is set."""

    def compile(self, call: trainer.TrainerCall) -> None:
        """Checks that the model was made under the distribution.

        Raises:
            ValueError: the model was made before the distribution was set.
        """
        _check_made(call.model, call.name, _current())

    def fit(self, call: trainer.TrainerCall) -> None:
        """Checks the model and its optimizer, and takes data that are divided already as this process's own.

        Raises:
            ValueError: the model or the optimizer was made before the distribution was set; or each process passes its
                own data, which are no `tf.data.Dataset`.
        """
        current = _current()
        _check_made(call.model, call.name, current)
        if not private.deals(current):
            for name in ("x", "validation_data"):
                if call.arguments.get(name) is not None:
                    call.arguments[name] = _own(call.arguments[name], strategy_of(current), f"{call.name}({name}")

    evaluate = predict = fit

    def train_on_batch(self, call: trainer.TrainerCall) -> None:
        """Checks the model and its optimizer, and takes this process's rows of a batch that all pass.

        Raises:
            ValueError: the model or the optimizer was made before the distribution was set.
        """
        current = _current()
        _check_made(call.model, call.name, current)
        if private.deals(current):
            own = functools.partial(_own_rows, strategy_of(current))
            for name in _BATCH & call.arguments.keys():
                call.arguments[name] = tree.map_structure(own, call.arguments[name])

    test_on_batch = train_on_batch

    @contextlib.contextmanager
    def symbolic_build(self, call: trainer.TrainerCall) -> Iterator[None]:
        """Checks the keys of a `LayoutMap`, as soon as the model has weights.

        Raises:
            ValueError: no key matches, and that is an error.
        """
        yield
        layouts.check_keys(_current(), call.model, settings.strict)


def _check_made(model: Any, method: str, distribution: Any) -> None:
    strategy = strategy_of(distribution)
    if models.strategy_of(model) is not strategy:
        what = f"the model {model.name}"
    elif method != "compile" and _is_apart(getattr(model, "optimizer", None), strategy):
        what = f"the optimizer {model.optimizer.name}"
    else:
        return
    raise ValueError(
        f"{method}: {what} was not made under the distribution that is set, {type(distribution).__name__}. Make the "
        "model and its optimizer after keras.distribution.set_distribution, or within `with distribution.scope():`."
    )


def _is_apart(optimizer: Any, strategy: DistributionStrategy) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner is not None and optimizers.strategy_of(inner, strategy) is not strategy


def _own_rows(strategy: DistributionStrategy, component: Any) -> Any:
    """Returns this process's rows of an array of a batch; what has no rows is for Keras to refuse."""
    shape: Any = getattr(component, "shape", ())
    return component[partition(shape[0], strategy.size)[strategy.rank]] if len(shape) else component


def _own(data: Any, strategy: DistributionStrategy, where: str) -> Any:
    if isinstance(data, tf.distribute.DistributedDataset):  # also where `fit` evaluates
        return data
    if not isinstance(data, tf.data.Dataset):
        raise ValueError(
            f"{where}=…) with auto_shard_dataset=False must be a tf.data.Dataset of this process's batches; got "
            f"{type(data).__name__}. Leave out auto_shard_dataset=False to pass the same data on all processes."
        )
    return strategy.distribute_datasets_from_function(lambda _: data)
