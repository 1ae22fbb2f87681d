"""Updates by gradients of several sizes, which TensorFlow's collectives or tfdist's engine sum over processes.

    tfdist run -n 2 benchmarks/gpu/sums.py

On GPUs, TensorFlow's are NCCL's; each process needs a GPU of its own. Both sum in turn in the same processes.
"""

import argparse
import statistics
import time

import keras
import tensorflow as tf

import tfdist


def updating(strategy, mib):
    """A function that sums one gradient of a size, updates a variable by it, and waits for the result."""
    with strategy.scope():
        variable = tf.Variable(tf.zeros([mib << 18]))
        optimizer = keras.optimizers.SGD(1e-9)
        optimizer.build([variable])

    @tf.function
    def step(gradient):
        strategy.run(lambda: optimizer.apply([gradient], [variable]))
        return variable[0]

    gradient = tf.ones([mib << 18])

    def update():
        begin = time.perf_counter()
        step(gradient).numpy()
        return time.perf_counter() - begin

    return update


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="MiB of the gradients")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--devices", nargs="+", help="this process's device; by default its GPU, or the CPU")
    options = parser.parse_args()
    strategies = [
        tfdist.AllReduceStrategy(devices=options.devices, algorithm=algorithm) for algorithm in ("tensorflow", "auto")
    ]
    for mib in options.sizes:
        updates = [updating(strategy, mib) for strategy in strategies]
        for update in updates:
            update()
        seconds = [
            [statistics.median(update() for _ in range(options.steps)) for update in updates]
            for _ in range(options.rounds)
        ]
        if not strategies[0].rank:
            times = [1e3 * statistics.median(column) for column in zip(*seconds, strict=True)]
            ratios = sorted(theirs / ours for theirs, ours in seconds)
            print(
                f"{mib:4} MiB: TensorFlow {times[0]:7.2f} ms, engine {times[1]:7.2f} ms; "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of the engine's"
            )


if __name__ == "__main__":
    main()
