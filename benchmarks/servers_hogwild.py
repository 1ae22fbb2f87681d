"""Steps per second of all workers together: Hogwild! against messages, by the size of the model and of what changes.

Plain Keras in one process, and one parameter server with one and two workers on this machine: gradients that are pushed
(`Asynchronous`), differences that are pushed in each step (`LocalSteps(1)`), and `Hogwild`. Rounds alternate.

    python benchmarks/servers_hogwild.py
"""

import contextlib
import statistics
import sys

import servers
import servers_small
import side_by_side

BATCH = 32
DENSE, LARGE, TABLE = "dense, 25,000 parameters", "dense, 4 million parameters", "embedding, 100,000 × 32"
MODES = {"Asynchronous()": None, "LocalSteps(1)": "LocalSteps", "Hogwild()": "Hogwild"}
PLAIN = "plain Keras"


def make(case):
    """A model, and an endless dataset."""
    import keras
    import numpy as np
    import tensorflow as tf

    if case == DENSE:
        return servers_small.make_model(), servers_small.make_dataset()
    generator = np.random.default_rng(0)
    if case == LARGE:
        layers = [keras.layers.Input((2000,)), keras.layers.Dense(2000, "relu"), keras.layers.Dense(1)]
        x = generator.normal(size=(20 * BATCH, 2000)).astype("float32")
    else:
        table = keras.layers.Embedding(100_000, 32)
        layers = [keras.layers.Input((10,), dtype="int64"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
        x = generator.integers(0, 100_000, (100 * BATCH, 10))
    y = generator.normal(size=(len(x), 1)).astype("float32")
    return keras.Sequential(layers), tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH)


def train(case, mode, steps, readings):
    import keras

    scope = contextlib.nullcontext()
    if mode != PLAIN:
        import tfdist
        from tfdist.parameter_server.options import pushes

        chosen = MODES[mode]
        scope = tfdist.ParameterServerStrategy(pushes=getattr(pushes, chosen or "Gradients")()).scope()
    keras.utils.set_random_seed(0)
    with scope:
        model, dataset = make(case)
        model.compile(keras.optimizers.SGD(0.01), "mse")
    rates = servers_small.by_fit(model, steps, readings, dataset)
    (side_by_side if mode == PLAIN else servers).report({"rate": statistics.median(rates)})


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="steps of a reading")
    parser.add_argument("--readings", type=int, default=5, help="readings of a round, of which the median is taken")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    amount = [str(options.steps), str(options.readings)]
    figures = {}
    for case in (DENSE, LARGE, TABLE):
        rates = figures[case] = {}
        for _ in range(options.rounds):
            plain = side_by_side.measure([__file__, "--train", case, PLAIN, *amount], cores=False)
            rates.setdefault(PLAIN, []).append(plain["rate"])
            for workers in options.workers:
                for mode in MODES:
                    reports = servers.run([__file__, "--train", case, mode, *amount], workers)
                    name = f"{mode}, {workers} worker{'s' * (workers > 1)}"
                    rates.setdefault(name, []).append(sum(report["rate"] for report in reports))
        rows = [(name, servers.spread(values)) for name, values in rates.items()]
        side_by_side.table(rows, ["median", "from", "to"], f"{case}: steps per second")
        side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--train" in sys.argv:
        train(*sys.argv[2:4], *map(int, sys.argv[4:6]))
    else:
        main()
