"""The cost of an epoch of `fit` and of a call of `evaluate` in addition to their steps, with plain Keras and tfdist.

A tiny model is trained in short and in long epochs: the difference gives the cost of a step, and the rest of a short
epoch is the cost of the epoch itself. Two kinds of data are measured: arrays, from which Keras makes a dataset, and a
`tf.data` dataset, for which plain Keras does not wait for the autotuner, as tfdist does not. With arrays plain Keras
waits for it, in some epochs. Figures are medians of several epochs and of several alternating rounds.

What processes compare is timed by itself, too: what each gives `fit`, once for each call (the agreement), and weights
and optimizer state after each epoch, for the tiny model and for one of 5.3 million parameters with Adam.

    python benchmarks/epochs.py
"""

import contextlib
import inspect
import itertools
import statistics
import sys
import time

import side_by_side

SHORT, LONG = 4, 54
BATCH = 8


def measure(plain):
    import keras
    import numpy as np
    import tensorflow as tf

    if plain:
        size, rank, scope = 1, 0, contextlib.nullcontext()
    else:
        import tfdist

        strategy = tfdist.AllReduceStrategy()
        size, rank, scope = strategy.size, strategy.rank, strategy.scope()
    x = np.random.default_rng(0).normal(size=(BATCH * LONG, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with scope:
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    figures = {"processes": size}
    for kind in ("arrays", "dataset"):
        epochs, evaluations = {}, {}
        for steps in (SHORT, LONG):
            rows = BATCH * steps
            data = {"x": x[:rows], "y": y[:rows], "batch_size": BATCH}
            if kind == "dataset":
                options = tf.data.Options()
                options.autotune.enabled = False
                dataset = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(BATCH)
                data = {"x": dataset.with_options(options)}
            ends = []
            clock = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, ends=ends: ends.append(time.perf_counter())
            )
            model.fit(**data, epochs=24, verbose=0, callbacks=[clock])
            epochs[steps] = statistics.median(after - before for before, after in itertools.pairwise(ends[3:]))
            seconds = []
            for _ in range(10):
                begun = time.perf_counter()
                model.evaluate(**data, verbose=0)
                seconds.append(time.perf_counter() - begun)
            evaluations[steps] = statistics.median(seconds[1:])
        for name, seconds in (("epoch", epochs), ("evaluate", evaluations)):
            step = (seconds[LONG] - seconds[SHORT]) / (LONG - SHORT)
            figures[f"{kind}: a step of {name}"] = 1e3 * step
            figures[f"{kind}: {name} beside its steps"] = 1e3 * (seconds[SHORT] - SHORT * step)
    figures |= compared(None if plain else strategy, model, x)
    if rank == 0:
        side_by_side.report(figures)


def compared(strategy, small, x):
    """Milliseconds of what processes compare; of plain Keras, which compares nothing, 0."""
    names = "agreement of fit", "comparison, tiny model", "comparison, 5.3 million parameters with Adam"
    if strategy is None:
        return dict.fromkeys(names, 0.0)
    import keras

    from tfdist.strategies.keras import keras_agreement, keras_comparison

    extended = strategy.extended
    with strategy.scope():
        layers = [keras.layers.Dense(units) for units in (2048, 2048, 512, 10)]
        large = keras.Sequential([keras.layers.Input((8,)), *layers])
        large.compile("adam", "mse")
        large.optimizer.build(large.trainable_variables)
    call = inspect.signature(keras.Model.fit).bind(small, x, x, batch_size=BATCH)
    call.apply_defaults()
    calls = (
        lambda: keras_agreement.agree(small, extended, "fit", call.arguments),
        lambda: keras_comparison.compare(small, extended, "here"),
        lambda: keras_comparison.compare(large, extended, "here"),
    )
    return {
        name: 1e3 * statistics.median(duration(call) for _ in range(30))
        for name, call in zip(names, calls, strict=True)
    }


def duration(call):
    """Returns the duration of a call, in seconds."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    command = [__file__, "--measure"]
    figures = {"plain Keras": [], "tfdist, 1 process": [], "tfdist, 2 processes": []}
    for _ in range(options.rounds):
        figures["plain Keras"].append(side_by_side.measure([__file__, "--measure-plain"], 1, cores=True))
        figures["tfdist, 1 process"].append(side_by_side.measure(command, 1, cores=True))
        figures["tfdist, 2 processes"].append(side_by_side.measure(command, 2, way="tfdist"))
    names = [name for name in figures["plain Keras"][0] if name != "processes"]
    rows = []
    for name in names:
        medians = {who: statistics.median(reading[name] for reading in rounds) for who, rounds in figures.items()}
        rows.append((name, medians))
    side_by_side.table(rows, list(figures), "milliseconds, medians of the rounds")
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(plain=False)
    elif "--measure-plain" in sys.argv:
        measure(plain=True)
    else:
        main()
