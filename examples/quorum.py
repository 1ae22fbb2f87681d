"""Training that goes on while processes die and come again; try it with `kill -9` on one of them.

The digits come with scikit-learn (`pip install '.[examples]'`).

    tfdist run -n 3 --restarts 10 examples/quorum.py
"""

import os

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

outer = tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
strategy = tfdist.QuorumStrategy(sync_every=16, rule=outer, grace=5.0)
print(f"worker {strategy.rank} is process {os.getpid()}")
keras.utils.set_random_seed(0)
digits = load_digits()
images = (digits.data / 16).astype("float32")
train_x, test_x, train_y, test_y = train_test_split(images, digits.target, test_size=300, random_state=0)

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.001),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# Each process trains on a part of the data; all of them validate the same weights.
shard = slice(strategy.rank, None, strategy.size)
model.fit(train_x[shard], train_y[shard], batch_size=16, epochs=40, validation_data=(test_x, test_y))
print(f"worker {strategy.rank} has taken part in {strategy.communication()['rounds']} rounds.")
