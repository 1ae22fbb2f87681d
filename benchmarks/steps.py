"""What a step of `fit` takes above plain Keras's: under every strategy, and where more than gradients are summed.

The model is a `Dense(1)` and more only where a row says so: a step takes as little time as it can. Each process has one
core, plain Keras too. Strategies are made by default, so `LocalSGDStrategy` exchanges weights after 8 steps and
`QuorumStrategy` after 64, but the quorum is both processes. The time of a step is the slope between epochs of few and
of many steps, so it is without what an epoch costs beside them. Rounds alternate.

    python benchmarks/steps.py
"""

import contextlib
import itertools
import statistics
import sys
import time

import side_by_side

ROWS, FEATURES, LENGTH = 8, 4, 5
COLUMNS, VALUES, WIDTH = 26, 1000, 16
"""Columns of categories of a table, values of each, and elements of the embedding of one."""
FEW, MANY, EPOCHS = 20, 320, 8
LAYERS = 30
PLAIN, ONE, DENSE = "plain Keras", "AllReduceStrategy, 1 process", "Dense(1)"
DEEP = f"{LAYERS} × Dense({FEATURES})"
BARE = "plain Keras, weights averaged by mpi4py"


def strategies():
    """Returns, by name, the number of workers and of servers, and a function that makes the strategy."""
    import tfdist

    return {
        ONE: (1, 0, tfdist.AllReduceStrategy),
        "AllReduceStrategy": (2, 0, tfdist.AllReduceStrategy),
        "LocalSGDStrategy": (2, 0, tfdist.LocalSGDStrategy),
        "GossipStrategy": (2, 0, tfdist.GossipStrategy),
        BARE: (2, 0, contextlib.nullcontext),
        "QuorumStrategy": (2, 0, lambda: tfdist.QuorumStrategy(quorum=2)),
        "ParameterServerStrategy, 1 worker": (1, 1, tfdist.ParameterServerStrategy),
    }


def averages(model):
    """Has each step of a model average its weights with those of the other process, by a host call and mpi4py alone.

    It is what gossip among two processes does, without lost processes, data that end, or a name for what goes wrong.
    """
    import numpy as np
    import tensorflow as tf

    import tfdist

    tfdist.init()
    from mpi4py import MPI

    comm, step, weights = MPI.COMM_WORLD, model.train_step, [weight.value for weight in model.weights]
    ends = np.cumsum([weight.shape.num_elements() for weight in weights])[:-1]

    def on_host(*values):
        own = np.concatenate([value.numpy().reshape(-1) for value in values])
        received = np.empty_like(own)
        comm.Sendrecv(own, 1 - comm.rank, recvbuf=received, source=1 - comm.rank)
        means = np.split((own + received) / 2, ends)
        return [tf.constant(mean.reshape(value.shape)) for mean, value in zip(means, values, strict=True)]

    def train_step(data):
        logs = step(data)
        means = tf.py_function(on_host, weights, [weight.dtype for weight in weights])
        for weight, mean in zip(weights, means, strict=True):
            weight.assign(tf.ensure_shape(mean, weight.shape))
        return logs

    model.train_step = train_step


def cases(rows, synchronized):
    """Returns, by name, functions that make a model and data of so many steps, and callbacks.

    Args:
        rows: rows of a batch.
        synchronized: whether there is something that batch normalization can be synchronized over.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    def dense(*before, optimizer="sgd", shape=(FEATURES,)):
        model = keras.Sequential([keras.Input(shape), *before, keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        return model

    def deep():
        return dense(*(keras.layers.Dense(FEATURES) for _ in range(LAYERS)))

    def normalized():
        return dense(*(keras.layers.BatchNormalization(synchronized=synchronized) for _ in range(8)))

    def batches(steps, shape=(rows, FEATURES)):
        x = np.random.default_rng(0).normal(size=shape).astype("float32")
        options = tf.data.Options()
        options.autotune.enabled = False  # plain Keras would wait for it
        return tf.data.Dataset.from_tensors((x, x[..., :1])).repeat(steps).with_options(options)

    def embedded():
        columns = keras.Input((COLUMNS,), dtype="int32")
        rows = [keras.layers.Embedding(VALUES, WIDTH)(columns[:, column]) for column in range(COLUMNS)]
        model = keras.Model(columns, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
        model.compile("sgd", "mse")
        return model

    def categories(steps):
        x = np.random.default_rng(0).integers(0, VALUES, (rows, COLUMNS)).astype("int32")
        return batches(steps).map(lambda _, y: (x, y))

    on_batches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    scaled = keras.optimizers.LossScaleOptimizer
    return {
        DENSE: (dense, batches, []),
        DEEP: (deep, batches, []),
        "a callback on batches": (dense, batches, [on_batches]),
        "batches of unknown number": (dense, lambda steps: batches(steps).filter(lambda x, y: True), []),
        "loss scaling": (lambda: dense(optimizer=scaled(keras.optimizers.SGD())), batches, []),
        "masks": (
            lambda: dense(keras.layers.Masking(), shape=(LENGTH, FEATURES)),
            lambda steps: batches(steps, (rows, LENGTH, FEATURES)),
            [],
        ),
        "8 × BatchNormalization, synchronized": (normalized, batches, []),
        f"{COLUMNS} × Embedding": (embedded, categories, []),
    }


def measure(name):
    """Reports the milliseconds of a step of every case, or of the first two under strategies other than all-reduce."""
    import keras

    is_plain = name in (PLAIN, BARE)
    workers, _, make = (1, 0, contextlib.nullcontext) if name == PLAIN else strategies()[name]
    strategy = make()
    scope = contextlib.nullcontext if is_plain else strategy.scope
    figures = {}
    for case, (model_of, batches, callbacks) in cases(ROWS if is_plain else ROWS * workers, not is_plain).items():
        if case not in (DENSE, DEEP) and "AllReduce" not in name and name != PLAIN:
            continue
        with scope():
            model = model_of()
        if name == BARE:
            averages(model)
        seconds = {}
        for steps in (FEW, MANY):
            ends = []
            clock = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, ends=ends: ends.append(time.perf_counter())
            )
            model.fit(batches(steps), epochs=EPOCHS, verbose=0, callbacks=[*callbacks, clock])
            seconds[steps] = statistics.median(after - before for before, after in itertools.pairwise(ends))
        figures[case] = 1e3 * (seconds[MANY] - seconds[FEW]) / (MANY - FEW)
    if getattr(strategy, "rank", 0) == 0:
        side_by_side.report(figures)


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures = {name: [] for name in (PLAIN, *strategies())}
    for _ in range(options.rounds):
        figures[PLAIN].append(side_by_side.measure([__file__, "--measure", PLAIN], cores=True))
        for name, (workers, servers, _) in strategies().items():
            launcher = ["--ps", str(servers)] if servers else []
            way = {"cores": True} if name == ONE else {"way": "tfdist", "launcher": launcher}
            figures[name].append(side_by_side.measure([__file__, "--measure", name], workers, **way))
    rows, above = [], {}
    for name in strategies():
        for case in figures[name][0]:
            pairs = zip(figures[name], figures[PLAIN], strict=True)
            above[f"{name}: {case}"] = [step[case] - plain[case] for step, plain in pairs]
    for row, values in above.items():
        median, low, high = side_by_side.median_and_spread(values)
        rows.append((row, {"median": median, "from": low, "to": high}))
    side_by_side.table(rows, ["median", "from", "to"], "milliseconds of a step above plain Keras's, by rounds")
    side_by_side.save(options.json, {"milliseconds": figures, "above plain Keras": above})


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(sys.argv[sys.argv.index("--measure") + 1])
    else:
        main()
