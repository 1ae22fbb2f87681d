"""`fit` on two processes with one core each, beside what a user would otherwise run: samples per second.

- *tfdist*: `AllReduceStrategy` on two processes, and on one.
- *apart*: two processes of plain Keras that do not talk to each other, which no data-parallel training can exceed.
- *apart, all rows* (the transformer): the same, but each applies as many rows of the embedding's gradient as both have,
  as every process does where their gradients are summed.
- *apart, in step* (the transformer): the same again, and each waits in every step until the other has its gradients, as
  a sum of them has to. Nothing is sent: this is what no exact data-parallel training can exceed.
- *alone*: one process of plain Keras, on one core; *both cores*: one on two.
- *DDP*: PyTorch's DistributedDataParallel on Gloo, an equal model of `torch.nn` in a loop of its own; *Keras in DDP*:
  the model of Keras, on PyTorch, in the same loop.

An MLP of 5.8 M parameters, a LeNet and a small transformer. Ways alternate; figures are medians of rounds, and ratios
medians of the rounds' ratios. No way waits for `tf.data`'s autotuner, for which plain Keras waits by default, up to
0.6 of an epoch's time. PyTorch has a Python of its own; without ``--torch-python`` it is left out.

    python -m venv torch-venv && torch-venv/bin/pip install torch numpy keras
    python benchmarks/peers.py --torch-python torch-venv/bin/python
"""

import os
import subprocess
import sys
import tempfile
import time

import side_by_side

BATCH = {"mlp": 128, "lenet": 64, "text": 32}
"""Batch size of each worker, by model."""
STEPS = {"mlp": 60, "lenet": 400, "text": 24}
EPOCHS = 4
"""Number of epochs, of which the first is not counted."""
WORDS, LENGTH, WIDTH = 20_000, 128, 128
WAYS = {
    "tfdist": ("tfdist", 2, 1),
    "apart": ("keras", 2, 1),
    "apart, all rows": ("keras all-rows", 2, 1),
    "apart, in step": ("keras in-step", 2, 1),
    "tfdist alone": ("tfdist", 1, 1),
    "alone": ("keras", 1, 1),
    "both cores": ("keras", 1, 2),
    "DDP": ("torch", 2, 1),
    "Keras in DDP": ("torch keras", 2, 1),
}
"""What runs, on how many processes, with how many cores each."""


def data(name, samples):
    """Random inputs and labels."""
    import numpy as np

    generator = np.random.default_rng(0)
    if name == "text":
        return generator.integers(0, WORDS, (samples, LENGTH)).astype("int32"), generator.integers(0, 2, samples)
    shape = (784,) if name == "mlp" else (28, 28, 1)
    return generator.normal(size=(samples, *shape)).astype("float32"), generator.integers(0, 10, samples)


def model_of(name, width=WIDTH):
    """A model; only the transformer ("text") looks at the width."""
    import keras
    from keras import layers

    class Positions(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(LENGTH, width), initializer="uniform", name="table")

        def call(self, x):
            return x + self.table

    if name == "mlp":
        hidden = [layers.Dense(2048, "relu"), layers.Dense(2048, "relu")]
        return keras.Sequential([layers.Input((784,)), *hidden, layers.Dense(10)])
    if name == "lenet":
        return keras.Sequential(
            [
                layers.Input((28, 28, 1)),
                layers.Conv2D(6, 5, padding="same", activation="relu"),
                layers.AveragePooling2D(2),
                layers.Conv2D(16, 5, activation="relu"),
                layers.AveragePooling2D(2),
                layers.Flatten(),
                layers.Dense(120, "relu"),
                layers.Dense(84, "relu"),
                layers.Dense(10),
            ]
        )
    x = tokens = layers.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(WORDS, width)(x))
    for _ in range(2):
        x = layers.LayerNormalization()(layers.add([x, layers.MultiHeadAttention(4, width // 4)(x, x)]))
        x = layers.LayerNormalization()(layers.add([x, layers.Dense(width)(layers.Dense(4 * width, "relu")(x))]))
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def with_all_rows(base):
    """Returns a class of optimizers that apply each sparse gradient's rows, and as many of other words."""
    import tensorflow as tf

    def of_both(gradient):
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        values, indices = gradient.values, gradient.indices
        return tf.IndexedSlices(
            tf.concat([values, values], 0), tf.concat([indices, WORDS - 1 - indices], 0), gradient.dense_shape
        )

    class WithAllRows(base):
        def apply(self, gradients, trainable_variables=None):
            super().apply([of_both(gradient) for gradient in gradients], trainable_variables)

    return WithAllRows


def in_step(base, path, rank):
    """Returns a class of optimizers that apply gradients when the other process has its own, too."""
    import numpy as np
    import tensorflow as tf

    steps = np.memmap(path, np.int64, "r+", shape=2)

    def wait(gradient):
        steps[rank] += 1
        while steps[1 - rank] < steps[rank]:
            time.sleep(1e-5)
        return gradient

    class InStep(with_all_rows(base)):
        def apply(self, gradients, trainable_variables=None):
            gradients = list(gradients)
            last, dense = next((place, one) for place, one in enumerate(gradients) if isinstance(one, tf.Tensor))
            others = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
            with tf.control_dependencies(others):
                gradients[last] = tf.ensure_shape(tf.py_function(wait, [dense], dense.dtype), dense.shape)
            with tf.control_dependencies([gradients[last]]):
                super().apply([tf.nest.map_structure(tf.identity, one) for one in gradients], trainable_variables)

    return InStep


def measure(name, way, size, rank):
    """Trains, and reports the seconds of the fastest epoch on rank 0."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    if way == "tfdist":
        import tfdist

        strategy = tfdist.AllReduceStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = model_of(name)
        adam = keras.optimizers.Adam
        if way == "all-rows":
            adam = with_all_rows(adam)
        elif way == "in-step":
            adam = in_step(adam, os.environ["STEPS_OF_BOTH"], rank)
        optimizer = adam(1e-3) if name == "text" else keras.optimizers.SGD(0.01)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    batch = BATCH[name] * (size if way == "tfdist" else 1)
    dataset = tf.data.Dataset.from_tensor_slices(data(name, STEPS[name] * batch)).batch(batch)
    options = tf.data.Options()
    options.autotune.enabled = False  # as tfdist does; plain Keras would wait for it at the end of each epoch
    dataset = dataset.with_options(options)
    seconds = []
    for _ in range(EPOCHS):
        begun = time.perf_counter()
        model.fit(dataset, verbose=0)
        seconds.append(time.perf_counter() - begun)
    if getattr(strategy, "rank", 0) == 0:
        side_by_side.report(min(seconds[1:]))


def samples_per_second(name, way, torch_python):
    """Returns the samples per second of all processes together."""
    kind, size, cores = WAYS[way]
    threads = {"TF_NUM_INTRAOP_THREADS": str(cores), "OMP_NUM_THREADS": str(cores)}
    if kind.startswith("torch"):
        script = os.path.join(os.path.dirname(__file__), "peers_torch.py")
        command, how = [script, name, kind.split()[-1]], {"cores": True, "python": torch_python}
    else:
        command = [__file__, f"--measure={name}", kind.split()[-1], str(size)]
        how = {"way": "tfdist" if kind == "tfdist" and size > 1 else "plain", "cores": cores == 1}
    with tempfile.NamedTemporaryFile() as steps:  # of processes that wait for each other
        steps.write(bytes(16))
        steps.flush()
        seconds = side_by_side.measure_each(command, size, env={**threads, "STEPS_OF_BOTH": steps.name}, **how)
    rates = [STEPS[name] * BATCH[name] / each for each in seconds]  # of those that do not talk, each has its own
    return size * sum(rates) / len(rates)


def is_installed(kind, torch_python):
    if not kind.startswith("torch"):
        return True
    command = [torch_python, "-c", f"import {kind.split()[-1]}"]
    return bool(torch_python) and not subprocess.run(command, env={**os.environ, "KERAS_BACKEND": "torch"}).returncode


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--models", nargs="+", choices=BATCH, default=list(BATCH))
    parser.add_argument("--torch-python", metavar="PATH", help="a Python with PyTorch: see above")
    options = parser.parse_args()
    ways = [way for way, (kind, *_) in WAYS.items() if is_installed(kind, options.torch_python)]
    figures = {}
    for name in options.models:
        own = [way for way in ways if name == "text" or not way.startswith("apart, ")]
        rounds = [
            {way: samples_per_second(name, way, options.torch_python) for way in own} for _ in range(options.rounds)
        ]
        figures[name] = {}
        for way in own:
            median, low, high = side_by_side.median_and_spread([rates[way] for rates in rounds])
            ratio, least, most = side_by_side.median_and_spread([rates["tfdist"] / rates[way] for rates in rounds])
            figures[name][way] = {"samples_per_s": median, "ratio": ratio, "from": least, "to": most}
            print(
                f"{name:6} {way:15} {median:8.0f} samples/s ({low:.0f} to {high:.0f}); tfdist on two is "
                f"{ratio:.2f} × ({least:.2f} to {most:.2f})",
                flush=True,
            )
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    asked = next((place for place, argument in enumerate(sys.argv) if argument.startswith("--measure=")), None)
    if asked is None:
        main()
    else:
        way, size, rank = (*sys.argv[asked + 1 : asked + 3], *sys.argv[asked + 3 :], "0")[:3]
        measure(sys.argv[asked].partition("=")[2], way, int(size), int(rank))
