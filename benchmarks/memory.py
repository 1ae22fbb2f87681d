"""Memory of each of two training processes against one process: the peak while a large MLP trains.

python benchmarks/memory.py
"""

import sys
import threading

import side_by_side

UNITS = 6144


class Peak:
    """The peak memory of this process that is not backed by files (libraries), sampled frequently.

    What several processes map, such as the buffers that they read in each other, counts in equal shares (PSS).
    """

    def __init__(self):
        self.bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self):
        while not self._end.wait(0.005):
            with open("/proc/self/smaps_rollup") as lines:
                kib = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
            self.bytes = max(self.bytes, kib << 10)

    def stop(self):
        self._end.set()
        self._thread.join()
        return self.bytes


def measure():
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = tfdist.AllReduceStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(UNITS, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.layers.Input((784,)), *layers, keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.zeros((32 * strategy.size, 784), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros(len(x)))).batch(len(x)).repeat(10)
    peak = Peak()
    model.fit(data, epochs=2, verbose=0)
    most = peak.stop()
    if strategy.rank == 0:
        side_by_side.report({"peak": most, "gradients": 4 * model.count_params()})


def main():
    options = side_by_side.parser(__doc__.partition("\n")[0]).parse_args()
    command = [__file__, "--measure"]
    single = side_by_side.measure(command, 1, {"TF_NUM_INTRAOP_THREADS": "1"}, cores=True)
    two = side_by_side.measure(command, 2, way="tfdist")
    mib = {name: value / 2**20 for name, value in (("one", single["peak"]), ("two", two["peak"]))}
    gradients = single["gradients"] / 2**20
    share = (mib["two"] - mib["one"]) / gradients
    print(f"gradients of {gradients:.0f} MiB; one process {mib['one']:.0f} MiB, each of two {mib['two']:.0f} MiB")
    print(f"additional memory: {share:.2f} × the gradients")
    side_by_side.save(options.json, {"mib": mib, "gradients_mib": gradients, "share": share})


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure()
    else:
        main()
