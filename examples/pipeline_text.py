"""A language model in two stages: a transformer predicts the next character of Python's own source code.

Each stage is half of the model and runs on its own process, so that two processes train one copy of the model. With
more processes, several pairs train, each pair on its part of every batch. A single process runs both stages. The losses
do not depend on the number of processes. The text is Python's standard library, so nothing needs to be downloaded.

    python examples/pipeline_text.py
    tfdist run -n 2 examples/pipeline_text.py
    tfdist run -n 4 examples/pipeline_text.py
"""

import argparse
import sysconfig
from pathlib import Path

import keras
import numpy as np
from keras import layers

import tfdist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400, help="updates of the weights")
parser.add_argument("--sample", type=int, default=60, help="characters to generate")
options = parser.parse_args()

STAGES = 2
tfdist.init()
pipelines = max(1, tfdist.size() // STAGES)  # data-parallel copies of the pipeline
strategy = tfdist.PipelineStrategy(stages=STAGES, micro_batches=4, data=pipelines)
keras.utils.set_random_seed(0)

MODULES = "ast argparse calendar configparser csv datetime difflib doctest fractions inspect optparse random".split()
HELD_OUT = "shutil statistics textwrap".split()
CHARACTERS, LENGTH, WIDTH, BATCH = 128, 32, 64, 64


def windows(modules, count, seed):
    """Returns windows of the modules' text as numbers of ASCII characters, and the next character at each position."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / f"{module}.py").read_text(encoding="utf-8") for module in modules)
    numbers = np.frombuffer(text.encode("ascii", "replace"), "uint8").astype("int32")
    begins = np.random.default_rng(seed).integers(0, len(numbers) - LENGTH, count)
    sequences = numbers[begins[:, None] + np.arange(LENGTH + 1)]
    return sequences[:, :-1], sequences[:, 1:]


with strategy.scope():
    characters = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(CHARACTERS, WIDTH)(characters)
    x = layers.Conv1D(WIDTH, 5, padding="causal")(x)
    normalized = layers.LayerNormalization()(x)
    x = layers.add([x, layers.MultiHeadAttention(4, WIDTH // 4)(normalized, normalized, use_causal_mask=True)])
    hidden = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.add([x, layers.Dense(WIDTH)(hidden)])
    logits = layers.Dense(CHARACTERS)(layers.LayerNormalization()(x))
    model = keras.Model(characters, logits)
    model.compile(keras.optimizers.Adam(5e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

train = windows(MODULES, BATCH * options.steps, seed=1)
held_out = windows(HELD_OUT, 512, seed=2)
before = model.evaluate(*held_out, batch_size=BATCH, verbose=0)
model.fit(*train, batch_size=BATCH, verbose=2)
after = model.evaluate(*held_out, batch_size=BATCH, verbose=0)

# Predictions are equal on all processes, so all of them choose the same characters.
generator = np.random.default_rng(0)
text = held_out[0][:1]
for _ in range(options.sample):
    last = model.predict(text[:, -LENGTH:], verbose=0)[0, -1].astype("float64")
    likely = np.exp(1.4 * (last - last.max()))
    text = np.append(text, [[generator.choice(CHARACTERS, p=likely / likely.sum())]], axis=1)

if tfdist.rank() == 0:
    print(f"Perplexity of other modules: {np.exp(before):.1f} before training, {np.exp(after):.1f} after")
    print("Goes on from", repr(bytes(text[0, :LENGTH].tolist()).decode()))
    print(bytes(text[0, LENGTH:].tolist()).decode())
