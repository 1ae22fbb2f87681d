"""Compares the arguments of `fit`, `evaluate` and `predict` on all processes, before any of them waits.

Without this check, ranks whose data or arguments differ would wait in different collectives. Each process sends a hash
of each argument, and the arguments themselves only if they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import MismatchError
from tfdist.private.datasets import DatasetsOfFunction
from tfdist.private.keras import array_slicing, tree
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.data import datasets
from tfdist.strategies.keras import keras_steps
from tfdist.tensors import unnumbered

DATA_OF_THEIR_OWN = (
    "If each process has its own data, pass the result of strategy.distribute_datasets_from_function, or train with "
    "tfdist.DistributedOptimizer."
)
"""The end of errors about data that differ."""

_SHOWN_CHARACTERS = 200


def install() -> None:
    """Installs the hooks, which have to be further out than those that call collectives."""
    keras_hooks.add(ArgumentChecks)


class ArgumentChecks(keras_hooks.ModelHooks[DataParallel]):
    """Hooks that compare the arguments of a method on all processes, except under elastic membership."""

    ability = DataParallel

    def fit(self, call: TrainerCall) -> None:
        """Compares the arguments of all processes, and agrees on the length of data that each has made for itself."""
        if call.is_within_fit:
            return
        if self.extended.runs_in_lockstep:
            if self.extended.has_several_replicas:
                keras_steps.check_functions(call.model, call.name)
            agree(call.model, self.extended, call.name, call.arguments)
        for data in (call.arguments["x"], call.arguments.get("validation_data")):
            if isinstance(data, DatasetsOfFunction):
                data.batches = _batches_of_all(data.own_batches, self.extended, gathers=call.name == "predict")

    evaluate = predict = fit


def _batches_of_all(own: int, extended: DataParallel, gathers: bool) -> int:
    """Returns the largest number of batches of any process; -2 if one does not know it.

    Where processes take their steps on their own, each ends an epoch with its own data.

    Args:
        own: number of batches of this process.
        extended: the strategy's `extended`.
        gathers: whether processes gather the results of each step.
    """
    exchange = extended.all_processes
    together = extended.runs_in_lockstep and (extended.synchronizes_steps or gathers)
    if not together or extended.is_local_only or len(exchange.members) == 1:
        return own
    numbers = exchange.all_gather(tf.constant([own], tf.int64)).numpy()
    return int(numbers.max()) if numbers.min() >= 0 else tf.data.UNKNOWN_CARDINALITY


def agree(model: Any, extended: DataParallel, method: str, given: dict[str, Any]) -> None:
    """Compares the arguments of a method on all processes, which all call this.

    Args:
        model: a Keras model.
        extended: the strategy's `extended`.
        method: name of the method.
        given: arguments of the method, by name.

    Raises:
        MismatchError: arguments differ between processes.
    """
    exchange = extended.all_processes
    if len(exchange.members) == 1 or extended.is_local_only:
        return
    facts = _facts(model, method, given, len(exchange.members))
    differing = exchange.compare(f"the arguments of {method}", facts)
    if not differing:
        return
    said = "; ".join(f"{name}: {by_value(values, exchange.members)}" for name, values in differing.items())
    raise MismatchError(
        f"rank {exchange.rank}: {method} was called with different arguments on different ranks: {said}. Call "
        f"`{method}` with the same data and arguments on every rank; each takes its share of each batch. "
        f"{DATA_OF_THEIR_OWN}"
    )


def _facts(model: Any, method: str, given: dict[str, Any], processes: int) -> dict[str, str]:
    """Returns, by name and as text, the facts that must be the same on all processes."""
    x, batch_size = given["x"], given["batch_size"]
    facts = {"x": _described(x, processes, in_order=method == "predict")}
    if first_array(x) is not None:
        batch_size = batch_size or 32  # Keras's default
    facts["batch_size"] = str(batch_size)
    for name in ("y", "sample_weight"):
        if name in given:
            facts[name] = "None" if given[name] is None else "given"
    if method == "fit":
        has_backup = any(
            isinstance(callback, keras.callbacks.BackupAndRestore) for callback in listed(given["callbacks"])
        )
        names = ["epochs", "steps_per_epoch", "validation_freq", "validation_steps", "validation_batch_size"]
        names += ["validation_split", "shuffle", "class_weight"]
        facts.update({name: str(given[name]) for name in names})
        facts["initial_epoch"] = "from the backup" if has_backup else str(given["initial_epoch"])
        data = given["validation_data"]
        facts["validation_data"] = _described(data[0] if isinstance(data, (tuple, list)) else data, processes)
    else:
        facts["steps"] = str(given["steps"])
    facts["steps_per_execution"] = str(getattr(model, "steps_per_execution", None))
    weights = [f"{unnumbered(variable.path)} {variable.dtype} {tuple(variable.shape)}" for variable in model.variables]
    facts["the model's variables"] = f"{len(weights)}: {', '.join(weights)}"
    return facts


def listed(callbacks: Any) -> list[Any]:
    """Returns the argument ``callbacks`` of `fit` as a list."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return tree.flatten(callbacks or [])


def first_array(data: Any) -> Any:
    """Returns the first array of data that consist of arrays; None for data of another kind."""
    first = next((part for part in tree.flatten(data) if part is not None), None)
    return first if array_slicing.can_slice_array(first) else None


def _described(data: Any, processes: int, in_order: bool = False) -> str:
    """Describes the kind of data, and the number of rows or batches, if it is known and must be the same.

    Args:
        data: the argument ``x`` of `fit`, or such data for validation.
        processes: number of processes.
        in_order: whether all processes read the same batches, also where TensorFlow would divide files among them.
    """
    if data is None:
        return "None"
    if isinstance(data, tf.data.Dataset):
        if not in_order and not datasets.is_cut_by_samples(data, processes):
            return "a tf.data.Dataset of which each process reads a part"
        return f"a tf.data.Dataset of {_number(int(data.cardinality()))} batches"
    if isinstance(data, datasets.SharedDataset):
        return f"a distributed dataset of {_number(int(data.dataset.cardinality()))} batches"
    if isinstance(data, DatasetsOfFunction):
        return "a dataset of each process's own"
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
        return "a distributed dataset"
    if isinstance(data, keras.utils.PyDataset):
        return f"a PyDataset of {data.num_batches} batches"
    if (first := first_array(data)) is not None:
        return f"arrays of {first.shape[0] if first.shape else 1} rows"
    return f"a {type(data).__name__}" + (f" of length {len(data)}" if hasattr(data, "__len__") else "")


def _number(cardinality: int) -> str:
    return {tf.data.INFINITE_CARDINALITY: "infinitely many", tf.data.UNKNOWN_CARDINALITY: "an unknown number of"}.get(
        cardinality, str(cardinality)
    )


def by_value(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Describes which ranks have which value; long values are shown from where they differ.

    Args:
        values: value of each rank, as text.
        ranks: the ranks, in the order of the values.
    """
    same = 0
    if max(map(len, values)) > _SHOWN_CHARACTERS:
        shortest = min(map(len, values))
        same = next((place for place in range(shortest) if len({text[place] for text in values}) > 1), shortest)
        same = max(max(text.rfind(", ", 0, same) for text in values) + 2, 0)
    parts = []
    for value in dict.fromkeys(values):
        shown = ("… " if same else "") + value[same : same + _SHOWN_CHARACTERS]
        shown += " …" if len(value) > same + _SHOWN_CHARACTERS else ""
        parts.append(f"{shown} on rank(s) {[rank for rank, text in zip(ranks, values, strict=True) if text == value]}")
    return ", ".join(parts)
