"""A custom training loop: the steps of `fit`, written out.

The digits come with scikit-learn (`pip install '.[examples]'`).

    tfdist run -n 2 examples/custom_loop.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.AllReduceStrategy()
keras.utils.set_random_seed(0)

digits = load_digits()
GLOBAL_BATCH = 64
dataset = tf.data.Dataset.from_tensor_slices(((digits.data / 16).astype("float32"), digits.target))
dataset = dataset.shuffle(2000, seed=0).batch(GLOBAL_BATCH, drop_remainder=True)
batches = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def replica_step(images, labels):
    """Takes one replica's step on its share of the global batch."""
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        # Divide by the global batch size, because gradients are summed over all replicas.
        loss = cross_entropy(labels, logits) / GLOBAL_BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    accuracy.update_state(labels, logits)
    return loss


@tf.function
def train_step(batch):
    losses = strategy.run(replica_step, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


for epoch in range(10):
    accuracy.reset_state()
    for batch in batches:
        loss = train_step(batch)
    value = float(accuracy.result())  # reduces over all replicas, so every process must call it
    if strategy.rank == 0:
        print(f"Epoch {epoch + 1}: loss {float(loss):.3f}, accuracy {value:.3f}")
