"""Gossip training: each process averages its weights with one other process whenever both are ready.

The digits come with scikit-learn (`pip install '.[examples]'`).

    tfdist run -n 3 examples/gossip.py
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

strategy = tfdist.GossipStrategy(topology="complete", synchronization=tfdist.parameter_server.Asynchronous())
keras.utils.set_random_seed(0)
digits = load_digits()
images = (digits.data / 16).astype("float32")
train_x, test_x, train_y, test_y = train_test_split(images, digits.target, test_size=300, random_state=0)

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# At the end of each epoch all processes take the mean of their weights; the reports show how far apart these were.
model.fit(
    train_x,
    train_y,
    batch_size=48,
    epochs=10,
    validation_data=(test_x, test_y),
    callbacks=[tfdist.callbacks.Communication(), tfdist.callbacks.StalenessReport()],
)
