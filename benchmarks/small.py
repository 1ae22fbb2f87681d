"""Small vectors inside a tf.function: the fixed cost of a step, also beside a data pipeline in Python.

Sums that a program asks for are calls of Python. Sums of gradients are an operation in machine code where there is one.
A large vector outside of a function shows what a mean costs more than a sum.

python benchmarks/small.py
"""

import functools
import statistics
import sys
import threading
import time

import side_by_side

STEPS = 200
SIZES = 64, 1024, 4096, 16384


def measure():
    import tensorflow as tf

    import tfdist
    from tfdist.collectives.barrier import barrier
    from tfdist.engine import machine_code

    means = "in machine code" if machine_code.is_usable() else "in Python"
    tfdist.init()
    strategy = tfdist.AllReduceStrategy()
    engine = strategy.extended.group.engine

    def median_of(step):
        for _ in range(30):
            step()
        engine.run("barrier", barrier())
        seconds = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        return 1e3 * statistics.median(seconds)

    def sums(count, elements):
        vectors = [tf.Variable(tf.ones([elements])) for _ in range(count)]

        def replica():
            values = [vector.read_value() for vector in vectors]
            with tf.control_dependencies(context().all_reduce("SUM", values)):
                return tf.constant(0)

        context = tf.distribute.get_replica_context
        return tf.function(lambda: strategy.run(replica))

    def gradients(elements):
        vector, bridge = tf.ones([elements]), strategy.extended.bridge
        function = tf.function(lambda given: bridge.all_reduce([given], in_memory=True))
        return lambda: function(vector)

    variable = tf.Variable(tf.ones([16384]))
    large = tf.random.uniform([22 << 18])
    steps = {
        "an empty function": tf.function(variable.read_value),
        "an empty py_function": tf.function(lambda: tf.py_function(lambda x: x, [variable.read_value()], tf.float32)),
        "64 KiB": sums(1, 16384),
        "200 × 4 KiB": sums(200, 1024),
        "1 × 800 KiB": sums(1, 200 * 1024),
        **{f"gradients of {size} KiB, {means}": gradients(size << 8) for size in SIZES},
        **{f"22 MiB, {op}": functools.partial(tfdist.all_reduce, large, op) for op in ("sum", "mean")},
    }
    figures = {name: {"alone": median_of(step)} for name, step in steps.items()}
    busy = True

    def pipeline():
        while busy:
            sum(range(1000))

    thread = threading.Thread(target=pipeline)
    thread.start()
    for name, step in steps.items():
        figures[name]["beside Python"] = median_of(step)
    busy = False
    thread.join()
    if strategy.rank == 0:
        side_by_side.report(figures)


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="number of runs, of which the median is taken")
    options = parser.parse_args()
    runs = [side_by_side.measure([__file__, "--measure"], 2, way="tfdist") for _ in range(options.runs)]
    figures = {
        name: {column: statistics.median(run[name][column] for run in runs) for column in values}
        for name, values in runs[0].items()
    }
    side_by_side.table(list(figures.items()), ["alone", "beside Python"], "milliseconds a step, 2 processes")
    above = figures["64 KiB"]["alone"] - figures["an empty py_function"]["alone"]
    fused = figures["200 × 4 KiB"]["alone"] / figures["1 × 800 KiB"]["alone"]
    print(f"\n64 KiB: {above:.2f} ms above an empty py_function")
    empty = figures["an empty function"]["alone"]
    of_gradients = {name: row["alone"] - empty for name, row in figures.items() if name.startswith("gradients")}
    for name, milliseconds in of_gradients.items():
        print(f"{name}: {milliseconds:.2f} ms above an empty function")
    print(f"200 tensors of 4 KiB: {fused:.2f} × the time of one of their size")
    averaged = statistics.median(run["22 MiB, mean"]["alone"] / run["22 MiB, sum"]["alone"] for run in runs)
    print(f"a mean of 22 MiB: {averaged:.2f} × the time of a sum")
    result = {"milliseconds": figures, "above": above, "fused": fused, "gradients": of_gradients, "averaged": averaged}
    side_by_side.save(options.json, result)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure()
    else:
        main()
