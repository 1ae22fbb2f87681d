"""A small CNN on scanned digits: the same script runs on one process or on many.

The digits come with scikit-learn (`pip install '.[examples]'`).

    python examples/digits.py
    tfdist run -n 2 examples/digits.py
"""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

strategy = tfdist.AllReduceStrategy()
keras.utils.set_random_seed(0)

digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
train_x, test_x, train_y, test_y = train_test_split(images, digits.target, test_size=300, random_state=0)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# The batch size is global: on two processes each trains on 32 of these 64 samples.
model.fit(train_x, train_y, batch_size=64, epochs=15)
loss, accuracy = model.evaluate(test_x, test_y, batch_size=128, verbose=0)

if strategy.rank == 0:
    sent = strategy.communication()
    print(f"Test accuracy: {accuracy:.3f}")
    print(
        f"{strategy.size} process(es); each sent {sent['bytes'] / 1e6:.1f} MB in {sent['messages']} messages, "
        f"for {sent['collectives']} collectives."
    )
