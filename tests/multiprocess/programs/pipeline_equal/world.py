"""What the checks of this folder share: where they train, how a check is declared, models and data."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

CHECKS = {}
ROWS = 26
"""Batches of 8 and a last one of 2, which may be fewer than there are micro-batches."""


@dataclass
class Check:
    """A function of a `Place` that returns numbers, the number of processes, and the arguments of the strategy."""

    function: Callable[["Place"], dict[str, Any]]
    size: int
    arguments: dict[str, Any]

    @property
    def name(self):
        return self.function.__name__


def check(size, **arguments):
    def declared(function):
        CHECKS[function.__name__] = Check(function, size, {"stages": size, "micro_batches": 2, **arguments})
        return function

    return declared


class Place:
    """Where a check trains: in plain Keras, or as a pipeline.

    Args:
        folder: folder of this process and this check.
        strategy: strategy of the pipeline; None for plain Keras.
    """

    def __init__(self, folder: Path, strategy: tfdist.PipelineStrategy | None = None) -> None:
        self.folder = folder
        self.strategy = strategy
        self.chief = strategy is None or strategy.rank == 0

    @property
    def shared(self):
        """A folder of all processes; but not of plain Keras."""
        path = self.folder.parent / ("plain" if self.strategy is None else "shared")
        path.mkdir(exist_ok=True)
        return path

    def scope(self):
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()


def network():
    hidden = [layers.Dense(7, "tanh", name=f"d{place}") for place in range(3)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3, name="last")])


def vectors(rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 3)).astype("float32")


def classes(rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 3, rows)


def crossentropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def made(place, make, optimizer, loss, metrics=list, **kwargs):
    """A model that is built and compiled in its scope.

    Optimizers are names or functions, and metrics a function of nothing, as they belong to the scope, too. Plain Keras
    is eager, as it would trace longer than it trains.
    """
    with place.scope():
        model = make()
        optimizer = optimizer() if callable(optimizer) else optimizer
        model.compile(optimizer, loss, metrics=metrics(), **{"run_eagerly": place.strategy is None, **kwargs})
    return model


def trained(place, model, x, y, epochs=2, **options):
    """The logs of `fit` on a dataset, and the weights afterwards: of arrays Keras traces functions in each `fit`."""
    x = tuple(x) if isinstance(x, list) else x  # a list would become one tensor
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    history = model.fit(data, epochs=epochs, verbose=0, **options).history
    return {"history": history, "state": state(place, model)}


def trained_on_arrays(place, model, x, y, **options):
    """The logs of `fit`, and the weights afterwards."""
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = model.fit(x, y, **options).history
    return {"history": history, "state": state(place, model)}


def fitted(place, model, x, y, **options):
    """What is `trained`, evaluated, and predicted."""
    results = trained_on_arrays(place, model, x, y, **options)
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    outputs = keras.tree.flatten(model.predict(x, batch_size=8, verbose=0))
    return {**results, "evaluated": evaluated, "outputs": {type(model.optimizer).__name__: outputs}}


def state(place, model):
    """The weights; and, on the chief, the variables of the file of a model, as plain Keras loads it."""
    path = place.shared / "model.keras"
    model.save(path)
    in_file = None
    if place.chief:
        loaded = keras.models.load_model(path)
        in_file = [variable.numpy() for variable in (*loaded.variables, *loaded.optimizer.variables)]
    return {type(model.optimizer).__name__: {"weights": model.get_weights(), "in file": in_file}}
