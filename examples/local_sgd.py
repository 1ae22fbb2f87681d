"""Local SGD over a slow link: processes take 25 steps on their own, then an outer optimizer joins their weights.

The digits come with scikit-learn (`pip install '.[examples]'`).

    tfdist run -n 2 examples/local_sgd.py
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

strategy = tfdist.LocalSGDStrategy(
    sync_every=25,
    rule=tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)),
    compression=tfdist.compression.Int8(),
)
keras.utils.set_random_seed(0)
digits = load_digits()
images = (digits.data / 16).astype("float32")
train_x, test_x, train_y, test_y = train_test_split(images, digits.target, test_size=300, random_state=0)

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.AdamW(5e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# The batch size is global, as under tfdist.AllReduceStrategy.
model.fit(train_x, train_y, batch_size=32, epochs=10, validation_data=(test_x, test_y))
if strategy.rank == 0:
    sent, gradients = strategy.communication()["bytes"], 4 * model.count_params() * int(model.optimizer.iterations)
    print(f"{strategy.size} process(es); each sent {sent / 1e6:.2f} MB; gradients are {gradients / 1e6:.1f} MB.")
