"""Callbacks that end training in the middle of an epoch: after some batches, where a loss diverges, where it is NaN."""

import os

import keras
import numpy as np
from common import batched, digits, strategy, weights

scope = strategy()
images, labels = digits(96)
flat = images.reshape(-1, 64)
whole = batched(flat, labels, size=12)
endless = whole.repeat()
nan_at = flat.copy()
nan_at[50] = np.nan


def network(rate=0.2, **compiling):
    with scope.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"], **compiling)
    return model


plain = network()
at_first = plain.get_weights()


def as_new(rate=0.2):
    """The model of fits that differ in data and callbacks, as it began: so its steps are traced once for all."""
    plain.set_weights(at_first)
    plain.optimizer.iterations.assign(0)
    plain.optimizer.learning_rate = rate
    return plain


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return flat[12 * index : 12 * index + 12], labels[12 * index : 12 * index + 12]


class StopsAfter(keras.callbacks.Callback):
    """As those who try out whether a script works, or who have a time limit."""

    def __init__(self, batches):
        super().__init__()
        self.left, self.losses = batches, []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        self.left -= 1
        if not self.left:
            self.model.stop_training = True


class RateFinder(keras.callbacks.Callback):
    """Raises the rate after each batch, and stops where the loss diverges."""

    def __init__(self):
        super().__init__()
        self.best, self.tried = np.inf, []

    def on_train_batch_end(self, batch, logs=None):
        self.best = min(self.best, float(logs["loss"]))
        self.tried.append(float(self.model.optimizer.learning_rate))
        if logs["loss"] > 2 * self.best:
            self.model.stop_training = True
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 2


class EvaluatesAfterwards(keras.callbacks.Callback):
    """Evaluates when another callback has just ended training."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        if self.model.stop_training:
            self.found.append(self.model.evaluate(batched(flat[:25], labels[:25], size=5), verbose=0))


ALWAYS = "arrays", "an endless dataset with steps", "several steps in a call"
"""The others meet the same code, and are in sweeps."""

results = {}
for name, data, arguments, compiling in (
    ("arrays", (flat, labels), {"batch_size": 12, "shuffle": False}, {}),
    ("an endless dataset", (endless,), {}, {}),
    ("an endless dataset with steps", (endless,), {"steps_per_epoch": 10, "validation_data": whole}, {}),
    ("a PyDataset", (Batches(),), {"shuffle": False}, {}),
    ("several steps in a call", (endless,), {"steps_per_epoch": 6}, {"steps_per_execution": 2}),
    ("eagerly", (flat, labels), {"batch_size": 12, "shuffle": False}, {"run_eagerly": True}),
):
    if name not in ALWAYS and not os.environ.get("TEST_SWEEP"):
        continue
    model = network(**compiling) if compiling else as_new()
    stops, evaluates = StopsAfter(3), EvaluatesAfterwards()
    history = model.fit(*data, epochs=4, verbose=0, callbacks=[stops, evaluates], **arguments).history
    results[name] = {
        "history": history,
        "weights": weights(model),
        "losses": stops.losses,
        "evaluated": evaluates.found,
        "steps": model.optimizer.iterations,
    }

model, finder = as_new(rate=0.01), RateFinder()
model.fit(endless, epochs=1, verbose=0, callbacks=[finder])
results["rates"] = {"tried": finder.tried, "weights": weights(model)}

model = as_new()
history = model.fit(
    batched(nan_at, labels, size=12), epochs=3, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
).history
results["nan"] = {"epochs": len(history["loss"]), "steps": model.optimizer.iterations}

# The same data train on afterwards, from where an endless dataset's iterator is.
model, stops = as_new(), StopsAfter(3)
model.fit(whole, epochs=1, verbose=0, callbacks=[stops])
history = model.fit(whole, epochs=2, verbose=0).history
results["again"] = {"history": history, "weights": weights(model), "steps": model.optimizer.iterations}
