"""A training loop in Horovod's style: functions instead of a strategy. Every process reads its own share of the data.

The digits come with scikit-learn (`pip install '.[examples]'`).

    tfdist run -n 2 examples/functions.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

tfdist.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[tfdist.local_rank() % len(gpus)], "GPU")
keras.utils.set_random_seed(tfdist.rank())

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
shard = slice(tfdist.rank(), None, tfdist.size())
batches = tf.data.Dataset.from_tensor_slices((images[shard], labels[shard])).shuffle(2000).batch(32)

model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(3e-3)
optimizer.build(model.trainable_variables)
tfdist.broadcast_variables(model.variables)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function(reduce_retracing=True)
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = cross_entropy(labels, model(images, training=True))
    gradients = tfdist.all_reduce(tape.gradient(loss, model.trainable_variables))
    optimizer.apply(gradients, model.trainable_variables)
    return loss


for epoch in range(10):
    for batch in batches:
        loss = train_step(*batch)
    last = tfdist.join()  # a process may have one batch fewer than another, and then takes a step less
    tfdist.broadcast_variables([*model.variables, *optimizer.variables], root_rank=last)
    mean = tfdist.all_reduce(loss)
    if tfdist.rank() == 0:
        print(f"Epoch {epoch + 1}: loss {float(mean):.3f}")
