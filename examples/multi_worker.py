"""TensorFlow's multi-worker tutorial with another strategy. See docs/multi_worker.md for a comparison.

The digits come with scikit-learn (`pip install '.[examples]'`). With TF_CONFIG on each machine, or on one:

    tfdist run -n 2 examples/multi_worker.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.AllReduceStrategy()

per_worker_batch_size = 32
global_batch_size = per_worker_batch_size * strategy.num_replicas_in_sync
digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000, seed=0).repeat().batch(global_batch_size)

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(dataset, epochs=3, steps_per_epoch=70, callbacks=[keras.callbacks.BackupAndRestore("backup")])
model.save("digits.keras")
