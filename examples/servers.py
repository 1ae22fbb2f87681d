"""Scanned digits on a parameter server: each worker takes the next batch when it is ready for one.

The digits come with scikit-learn (`pip install '.[examples]'`).

    python examples/servers.py
    tfdist run -n 2 --ps 1 examples/servers.py
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

strategy = tfdist.ParameterServerStrategy(data="shared")  # a parameter server serves here, and ends with the job
keras.utils.set_random_seed(0)

digits = load_digits()
train_x, test_x, train_y, test_y = train_test_split(digits.data / 16, digits.target, test_size=300, random_state=0)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# All workers pass the same data; each of the 47 batches of an epoch goes to one of them.
model.fit(train_x, train_y, batch_size=32, epochs=10, callbacks=[tfdist.callbacks.Communication()])
loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
print(f"{tfdist.role()}: test accuracy {accuracy:.3f} after {int(model.optimizer.iterations)} updates of all workers")
