"""Data-parallel convolutions and dense layers in parts ("one weird trick"), on scanned digits.

python examples/split_layers.py
tfdist run -n 2 examples/split_layers.py
"""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

tfdist.init()
# All processes are along the axis "model". Four could be Mesh(data=2, model=2): two pairs that each have all parts.
strategy = tfdist.AllReduceStrategy(mesh=tfdist.Mesh(model=tfdist.size()))
keras.utils.set_random_seed(0)

digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
train_x, test_x, train_y, test_y = train_test_split(images, digits.target, test_size=300, random_state=0)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            # Each process computes some of these units, for the rows of all processes, …
            tfdist.layers.ColumnParallelDense(256, "relu", gather_output=False),
            keras.layers.Dropout(0.25),
            # … and a term of these outputs, whose sums each process gets for its own rows.
            tfdist.layers.RowParallelDense(10, input_is_parallel=True),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(train_x, train_y, batch_size=64, epochs=10)
loss, accuracy = model.evaluate(test_x, test_y, batch_size=128, verbose=0)

if strategy.rank == 0:
    sent = strategy.communication()
    print(f"Test accuracy: {accuracy:.3f}")
    print(f"{strategy.size} process(es) for {model.count_params()} weights; each sent {sent['bytes'] / 1e6:.1f} MB.")
