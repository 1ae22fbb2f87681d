"""Keys per second of an embedding on parameter servers: each key's row is pulled, and its gradient pushed.

`tfdist.layers.DynamicEmbedding` in Keras's `fit`, compared with a sharded variable under TensorFlow's own parameter
servers: each with one step in a call of a graph, and with several (`steps_per_execution`, or a loop in the function
that the coordinator schedules); and with a cache of frequent rows. Keys follow a Zipf distribution; each side looks up
and updates the distinct keys of a batch, by SGD. All rows are there before the clock starts. Rounds alternate.

    python benchmarks/servers_embedding.py
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time

import servers
import side_by_side

DIM, BATCHES = 32, 300
STEPS_PER_CALL = 20
RATE = 0.1
ONE, SEVERAL, CACHED = "1 step a call", f"{STEPS_PER_CALL} steps a call", f"{STEPS_PER_CALL} steps a call, cache"
PLACED_AT_ONCE = 1 << 20
"""Rows that are made by one lookup before the clock starts."""


def make_dataset(options, seed=0):
    """An endless dataset of batches of keys, of which the most frequent ones are anywhere among all rows."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(seed)
    shares = np.cumsum(np.arange(1, options.rows + 1, dtype=np.float64) ** -options.exponent)
    ranks = np.searchsorted(shares, generator.random(BATCHES * options.batch) * shares[-1])
    places = np.random.default_rng(1).permutation(options.rows)
    keys = places[ranks].astype(np.int64)
    return tf.data.Dataset.from_tensor_slices(keys.reshape(BATCHES, options.batch)).repeat()


def measure_tfdist(options):
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    def mean_square(y, outputs):
        return tf.reduce_mean(tf.square(outputs), -1)

    kept = options.cache, options.staleness, options.own_writes == "now"
    cache = tfdist.layers.CachePolicy(*kept) if options.cache else None
    strategy = tfdist.ParameterServerStrategy()
    with strategy.scope():
        embedding = tfdist.layers.DynamicEmbedding(DIM, cache=cache)
        model = keras.Sequential([keras.layers.Input((), dtype="int64"), embedding])
        model.compile(keras.optimizers.SGD(RATE), mean_square, steps_per_execution=options.steps_per_call)
    table = embedding._rows.table
    begin = servers.rank() * PLACED_AT_ONCE
    for first in range(begin, options.rows, options.workers * PLACED_AT_ONCE):
        table._read(np.arange(first, min(options.rows, first + PLACED_AT_ONCE)), create=True)
    ends = []
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))
    data = make_dataset(options, servers.rank()).map(lambda keys: (keys, keys))
    servers.meet(options.workers)
    epochs = options.readings + 2  # the first of them traces, and fills the cache
    model.fit(data, steps_per_epoch=options.steps, epochs=epochs, verbose=0, callbacks=[clock])
    rates = [options.steps * options.batch / (after - before) for before, after in itertools.pairwise(ends[1:])]
    share = 0.0 if table.cache is None else table.cache.found / table.cache.asked
    servers.report({"rates": rates, "from the cache": share})


def measure_tensorflow(options, steps_per_call):
    import servers_tensorflow
    import tensorflow as tf

    with servers_tensorflow.running(options.workers, options.servers) as cluster:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
        partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(options.servers)
        strategy = tf.distribute.ParameterServerStrategy(resolver, partitioner)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            rows = tf.Variable(
                lambda shape=(options.rows, DIM), dtype=tf.float32, **_: tf.random.uniform(shape, -0.05, 0.05, dtype),
                shape=(options.rows, DIM),
                dtype=tf.float32,
            )
        shards = list(rows.variables) if hasattr(rows, "variables") else [rows]
        iterator = iter(coordinator.create_per_worker_dataset(lambda: make_dataset(options)))

        def replica(keys):
            distinct, places = tf.unique(keys)
            with tf.GradientTape() as tape:
                vectors = tf.nn.embedding_lookup(rows, distinct)
                loss = tf.reduce_mean(tf.square(tf.gather(vectors, places)))
            for shard, gradient in zip(shards, tape.gradient(loss, shards), strict=True):
                shard.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))

        @tf.function
        def call(iterator):
            if steps_per_call == 1:
                strategy.run(replica, (next(iterator),))
            else:
                for _ in tf.range(steps_per_call):
                    strategy.run(replica, (next(iterator),))

        calls = max(1, options.workers * options.steps // steps_per_call)
        rates = []
        for _ in range(options.readings + 1):
            begun = time.perf_counter()
            for _ in range(calls):
                coordinator.schedule(call, (iterator,))
            coordinator.join()
            rates.append(calls * steps_per_call * options.batch / (time.perf_counter() - begun))
        side_by_side.report({"rates": rates[1:]})
        os._exit(0)  # the coordinator's threads cannot be ended; its servers end with this process


def main(options):
    given = json.dumps(vars(options))

    def tfdist(steps_per_call, cache):
        settings = {"cache": cache, "steps_per_call": steps_per_call}
        command = [__file__, "--measure-tfdist", json.dumps(vars(options) | settings)]
        reports = servers.run(command, options.workers, options.servers, cores=options.cores)
        shares.setdefault("found in the cache", []).append(reports[0]["from the cache"])
        return sum(statistics.median(report["rates"]) for report in reports)

    def tensorflow(steps_per_call):
        command = [__file__, "--measure-tensorflow", given, str(steps_per_call)]
        return statistics.median(side_by_side.measure(command, cores=False)["rates"])

    ways = {
        f"tfdist, {ONE}": lambda: tfdist(1, 0),
        f"tfdist, {SEVERAL}": lambda: tfdist(STEPS_PER_CALL, 0),
        f"tfdist, {CACHED}": lambda: tfdist(STEPS_PER_CALL, options.cache),
        f"TensorFlow, {ONE}": lambda: tensorflow(1),
        f"TensorFlow, {SEVERAL}": lambda: tensorflow(STEPS_PER_CALL),
    }
    rates, shares = {name: [] for name in ways}, {}
    for _ in range(options.rounds):
        for name, way in ways.items():
            rates[name].append(way() / 1e3)
    pairs = [(f"tfdist, {name}", f"TensorFlow, {name}") for name in (ONE, SEVERAL)]
    pairs += [(f"tfdist, {CACHED}", f"TensorFlow, {SEVERAL}"), (f"tfdist, {CACHED}", f"tfdist, {SEVERAL}")]
    ratios = {
        f"{one} : {other}": [mine / theirs for mine, theirs in zip(rates[one], rates[other], strict=True)]
        for one, other in pairs
    }
    columns = ["median", "from", "to"]
    for title, table in (("thousands of keys per second, by rounds", rates), ("ratios, by rounds", ratios)):
        side_by_side.table([(name, servers.spread(values)) for name, values in table.items()], columns, title)
    share = max(shares["found in the cache"])
    print(f"\n{100 * share:.0f} % of the distinct keys of a batch were found in the cache")
    side_by_side.save(options.json, {"thousands of keys per second": rates, "ratios": ratios, **shares})


def parsed():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=10_000_000, help=f"of {DIM} columns")
    parser.add_argument("--exponent", type=float, default=1.05, help="of the Zipf distribution")
    parser.add_argument("--batch", type=int, default=4096, help="keys of a step")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--cache", type=int, default=200_000, help="keys that a worker keeps at most")
    parser.add_argument("--staleness", type=int, default=10, help="steps for which a worker uses a row that it keeps")
    parser.add_argument(
        "--own-writes", choices=("now", "late"), default="late", help="when a worker sees its updates of rows it keeps"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of a reading")
    parser.add_argument("--readings", type=int, default=3, help="readings of a round, of which the median is taken")
    parser.add_argument(
        "--cores", choices=("share", "all"), default="share", help="of tfdist run; the others may use all cores"
    )
    return parser.parse_args()


if __name__ == "__main__":
    if "--measure-tensorflow" in sys.argv:
        measure_tensorflow(argparse.Namespace(**json.loads(sys.argv[2])), int(sys.argv[3]))
    elif "--measure-tfdist" in sys.argv:
        measure_tfdist(argparse.Namespace(**json.loads(sys.argv[2])))
    else:
        main(parsed())
