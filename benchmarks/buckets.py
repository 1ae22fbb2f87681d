"""The size of buckets: a step that sums many medium-sized tensors, for several bucket sizes.

python benchmarks/buckets.py
"""

import statistics
import sys
import time

import side_by_side

MIB = 2**20
LIMITS = (1, 4, 16, 64)
"""MiB at which a bucket is closed."""
MODELS = {"200 × 16 KiB": (200, 4 << 10), "64 × 256 KiB": (64, 64 << 10), "16 × 2 MiB": (16, 512 << 10)}
ALONE = {"small ones packed": 1, "all packed": 1024, "none packed": 0}
"""MiB from which a tensor is sent separately."""


def measure(alone):
    import tensorflow as tf

    import tfdist
    from tfdist.engine import bridge, buckets

    strategy = tfdist.AllReduceStrategy()

    def median_of(count, elements, limit):
        vectors = [tf.Variable(tf.ones([elements])) for _ in range(count)]
        plan = buckets.plan
        bridge.buckets.plan = lambda sizes, kinds: plan(sizes, kinds, int(limit * MIB), int(alone * MIB))

        @tf.function
        def step():
            def replica():
                values = [vector.read_value() for vector in vectors]
                with tf.control_dependencies(tf.distribute.get_replica_context().all_reduce("SUM", values)):
                    return tf.constant(0)

            return strategy.run(replica)

        seconds = []
        for turn in range(40):
            begun = time.perf_counter()
            step()
            if turn >= 10:
                seconds.append(time.perf_counter() - begun)
        bridge.buckets.plan = plan
        return 1e3 * statistics.median(seconds)

    medians = {
        name: {str(limit): median_of(count, elements, limit) for limit in LIMITS}
        for name, (count, elements) in MODELS.items()
    }
    if strategy.rank == 0:
        side_by_side.report(medians)


def main():
    options = side_by_side.parser(__doc__.partition("\n")[0]).parse_args()
    figures = {}
    for way, alone in ALONE.items():
        rows = side_by_side.measure([__file__, f"--measure={alone}"], 2, way="tfdist")
        side_by_side.table(list(rows.items()), [str(limit) for limit in LIMITS], f"ms a step by MiB a bucket, {way}")
        figures[way] = rows
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    what = next((argument.split("=")[1] for argument in sys.argv if argument.startswith("--measure=")), None)
    if what is not None:
        measure(float(what))
    else:
        main()
