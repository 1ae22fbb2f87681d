"""A text model with an embedding: classifies sentences as formal or plain.

The sentences are generated, so nothing needs to be downloaded. The embedding's gradient stays sparse: the processes
exchange the rows of the words in a batch, not the whole table.

    tfdist run -n 2 examples/text.py
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist

strategy = tfdist.AllReduceStrategy()
keras.utils.set_random_seed(0)

COMMON = "the a of and to in it was that as with for his her not on at by from but".split()
FORMAL = "whence notwithstanding heretofore perchance thereupon albeit whilst verily".split()
PLAIN = "so then though maybe while until because really anyway almost".split()


def sentences(count, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    texts = []
    for label in labels:
        words = generator.choice(COMMON, 18).tolist()
        words[generator.integers(0, 18)] = str(generator.choice(FORMAL if label else PLAIN))
        texts.append(" ".join(words))
    return np.array(texts), labels.astype("float32")


train_texts, train_labels = sentences(2000, seed=1)
test_texts, test_labels = sentences(400, seed=2)

vectorize = keras.layers.TextVectorization(max_tokens=5000, output_sequence_length=20)
vectorize.adapt(train_texts)
dataset = tf.data.Dataset.from_tensor_slices((train_texts, train_labels)).batch(64)
dataset = dataset.map(lambda text, label: (vectorize(text), label))

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((20,), dtype="int64"),
            keras.layers.Embedding(5000, 16),
            keras.layers.GlobalMaxPooling1D(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])

model.fit(dataset, epochs=15)
_, accuracy = model.evaluate(vectorize(test_texts), test_labels, verbose=0)
if strategy.rank == 0:
    print(f"Test accuracy: {accuracy:.3f}")
