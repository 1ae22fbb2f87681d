"""A script as Horovod users write them: no strategy, every process its own rows, gradients averaged by a function.

Plain Keras stands for the functions with those of one process. Every process has as many rows, so that the mean of
the processes' gradients is the global one.
"""

import keras
import numpy as np
import tensorflow as tf
from common import PLAIN, digits, folder, strategy, weights

scope = strategy()
if PLAIN:

    class tfdist:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 1)
        init, barrier = staticmethod(lambda: None), staticmethod(lambda: None)
        all_reduce = staticmethod(lambda value, op="mean": value)
        all_gather = staticmethod(lambda value: value)
        broadcast = staticmethod(lambda value, root_rank=0: value)
        broadcast_variables = staticmethod(lambda variables, root_rank=0: None)

else:
    import tfdist

tfdist.init()
images, labels = digits(72)
rows = slice(tfdist.rank(), None, tfdist.size())
batches = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows])).batch(24 // tfdist.size())

keras.utils.set_random_seed(15 + tfdist.rank())  # initial weights differ until they are broadcast
model = keras.Sequential([keras.layers.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
tfdist.broadcast_variables(model.variables, root_rank=0)
tfdist.broadcast_variables(optimizer.variables, root_rank=0)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = cross_entropy(y, model(x, training=True))
    gradients = tfdist.all_reduce(tape.gradient(loss, model.trainable_variables))
    optimizer.apply(gradients, model.trainable_variables)
    return tfdist.all_reduce(loss)


losses = [float(train_step(x, y)) for _ in range(2) for x, y in batches]
correct = np.argmax(model(images[rows]), axis=1) == labels[rows]
accuracy = float(tfdist.all_reduce(tf.reduce_sum(tf.cast(correct, tf.float64)), "sum")) / 72
gathered = tfdist.all_gather(tf.constant(np.flatnonzero(correct) * tfdist.size() + tfdist.rank()))
told = tfdist.broadcast(tf.constant([1.5 + tfdist.rank()]), root_rank=0)

path = folder("horovod_style") / "model.keras"
if tfdist.rank() == 0:
    model.save(path)
tfdist.barrier()
results = {
    "weights": weights(model),
    "losses": losses,
    "accuracy": accuracy,
    "gathered": np.sort(gathered),
    "told": told,
    "loaded": weights(keras.models.load_model(path)),
}
