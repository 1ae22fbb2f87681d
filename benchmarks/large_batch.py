"""Large batches: test accuracy and time with small batches, large ones, and large ones with each remedy.

    python benchmarks/large_batch.py [--seeds 3] [--epochs 5] [--names "small batch" …]
    python benchmarks/large_batch.py --tune [--epochs 5]  # accuracies over `GRIDS`

Fashion-MNIST with LeNet, one process with one thread. All configurations see the same number of samples. Large batches
of 1024 come in 8 parts, whose gradients Keras accumulates; small ones have 64. Rates of large batches other than that
of small ones are warmed up to in two epochs; all are divided by ten after two thirds of the epochs.
"""

import os
import sys
import time

import side_by_side

SMALL, LARGE, PARTS = 64, 1024, 8
SAMPLES = 58 * LARGE
"""Number of training samples: whole batches of the 60,000."""

MOMENTUM, WARMUP = 0.9, 2
"""Momentum of SGD and LARS, and epochs of warmup."""

GRIDS = {
    "small batch": [0.01, 0.03],
    "tuned rate": [0.05, 0.1, 0.2, 0.4],
    "noise, diagonal": [0.05, 0.1, 0.2],
    "noise, trace": [0.05, 0.1, 0.2],
    "LARS": [1.0, 3.0, 10.0, 30.0],
    "Lamb": [0.003, 0.01, 0.03, 0.1],
    "noise, isotropic": [0.003, 0.01],
}
"""Learning rates, but of isotropic noise standard deviations, at the tuned rate."""

TUNED = {
    "small batch": 0.03,
    "tuned rate": 0.2,
    "noise, diagonal": 0.05,
    "noise, trace": 0.2,
    "LARS": 3.0,
    "Lamb": 0.03,
    "noise, isotropic": 0.003,
}
"""The best of `GRIDS` on another seed than those of the table."""

NAMES = [
    "small batch",
    "large batch",
    "linear rule",
    "square-root rule",
    "tuned rate",
    "LARS",
    "Lamb",
    "noise, isotropic",
    "noise, trace",
    "noise, diagonal",
]


def prepared(name, value=None):
    """Returns the optimizer, the batch size of `fit` and the callbacks of a configuration.

    Args:
        name: name of the configuration.
        value: learning rate or deviation of the noise; by default that of `TUNED`.
    """
    import keras

    from tfdist.callbacks import LearningRateScaling
    from tfdist.optimizers import LARS, GradientNoise

    of_small = TUNED["small batch"]
    value = value or TUNED.get(name, of_small)
    if name == "small batch":
        return keras.optimizers.SGD(value, MOMENTUM), SMALL, []
    rate = TUNED["tuned rate"] if name == "noise, isotropic" else value
    parts = {"gradient_accumulation_steps": PARTS}
    sgd = keras.optimizers.SGD(rate, MOMENTUM, **parts)
    optimizer = {
        "LARS": lambda: LARS(rate, MOMENTUM, **parts),
        "Lamb": lambda: keras.optimizers.Lamb(rate, **parts),
        "noise, isotropic": lambda: GradientNoise(sgd, structure="isotropic", stddev=value),
        "noise, trace": lambda: GradientNoise(sgd, LARGE / SMALL, "trace"),
        "noise, diagonal": lambda: GradientNoise(sgd, LARGE / SMALL, "diagonal"),
    }.get(name, lambda: sgd)()
    if name == "large batch":
        return optimizer, LARGE // PARTS, []
    factor = LARGE / SMALL
    warm_up = {
        "linear rule": lambda: LearningRateScaling(of_small, "linear", WARMUP, factor),
        "square-root rule": lambda: LearningRateScaling(of_small, "sqrt", WARMUP, factor),
    }.get(name, lambda: LearningRateScaling(rate / factor, "linear", WARMUP, factor))()
    return optimizer, LARGE // PARTS, [warm_up]


def described(name):
    """The learning rate of a configuration, in words."""
    of_small, factor = TUNED["small batch"], LARGE / SMALL
    rates = {"large batch": of_small, "linear rule": factor * of_small, "square-root rule": factor**0.5 * of_small}
    if name == "noise, isotropic":
        return f"{TUNED['tuned rate']:g}, σ = {TUNED[name]:g}"
    return f"{rates.get(name) or TUNED[name]:g}"


def train(name, data, seed, epochs, value=None):
    """Returns the accuracy on the test images, the loss of the last epoch, and the seconds of `fit`."""
    import fashion
    import keras

    (x, y), test = data
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    optimizer, batch, callbacks = prepared(name, value)
    falls = int(epochs * 2 / 3)
    callbacks.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 10 if epoch == falls else rate))
    model = fashion.lenet()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    begin = time.perf_counter()
    history = model.fit(x[:SAMPLES], y[:SAMPLES], batch_size=batch, epochs=epochs, verbose=0, callbacks=callbacks)
    seconds = time.perf_counter() - begin
    accuracy = model.evaluate(*test, batch_size=1000, verbose=0)[1]
    return {"accuracy": accuracy, "loss": history.history["loss"][-1], "seconds": seconds}


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--tune", action="store_true", help="one run for each value of the grids")
    options = parser.parse_args()
    import fashion

    data = fashion.load()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if options.tune:
        for name in options.names:
            for value in GRIDS.get(name, ()):
                print(f"{name}, {value}: {train(name, data, 100, options.epochs, value)}", flush=True)
        return
    runs = {name: [] for name in options.names}
    rates = {name: described(name) for name in options.names}
    figures = {"epochs": options.epochs, "small": SMALL, "large": LARGE, "rates": rates, "runs": runs}
    for seed in range(options.seeds):  # in turn, so that a slow spell of the machine meets all
        for name in options.names:
            runs[name].append(train(name, data, seed, options.epochs))
            print(f"{name}, seed {seed}: {runs[name][-1]}", file=sys.stderr, flush=True)
            side_by_side.save(options.json, figures)
    columns = ["accuracy, %", "from", "to", "loss", "s"]
    rows = []
    for name, of_name in runs.items():
        middle, low, high = side_by_side.median_and_spread([100 * run["accuracy"] for run in of_name])
        loss = side_by_side.median_and_spread([run["loss"] for run in of_name])[0]
        seconds = side_by_side.median_and_spread([run["seconds"] for run in of_name])[0]
        rows.append((name, dict(zip(columns, [middle, low, high, loss, seconds], strict=True))))
    side_by_side.table(rows, columns, f"Fashion-MNIST, LeNet, {options.epochs} epochs, {options.seeds} seed(s)")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
