"""`fit` in Horovod's style: every process reads its own share of the data. See docs/horovod.md for a comparison.

The digits come with scikit-learn (`pip install '.[examples]'`).

    tfdist run -n 2 examples/horovod_fit.py
"""

import keras
from sklearn.datasets import load_digits

import tfdist

tfdist.init()
digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
shard = slice(tfdist.rank(), 1600, tfdist.size())

model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
model.compile(
    tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    tfdist.callbacks.BroadcastVariables(),
    tfdist.callbacks.MetricAverage(),
    tfdist.callbacks.LearningRateScaling(0.05, warmup_epochs=2),
]
if tfdist.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("digits.keras"))
model.fit(
    images[shard],
    labels[shard],
    batch_size=32,
    epochs=10,
    callbacks=callbacks,
    validation_data=(images[1600:], labels[1600:]),
    verbose=2 if tfdist.rank() == 0 else 0,
)
