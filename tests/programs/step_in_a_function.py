"""``strategy.run`` of a `tf.function` that applies gradients, eagerly and in a loop inside a graph; `all_gather`."""

import keras
import tensorflow as tf
from common import PLAIN, digits, strategy, weights

scope = strategy()
images, labels = digits(72)
flat = images.reshape(-1, 64)

with scope.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

data = scope.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((flat, labels)).batch(24))


@tf.function
def replica_step(x, y):
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        loss = tf.reduce_sum(losses) / 24
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss


losses = []
for x, y in data:
    per_replica = scope.run(replica_step, args=(x, y))
    losses.append(float(scope.reduce("SUM", per_replica, axis=None)))


@tf.function
def epoch(iterator):
    total = tf.constant(0.0, tf.float64)
    for _ in tf.range(3):
        per_replica = scope.run(replica_step, args=next(iterator))
        total += scope.reduce("SUM", per_replica, axis=None)
    return total


total = float(epoch(iter(data)))


@tf.function
def gathered(x):
    def replica(x):
        return tf.distribute.get_replica_context().all_gather(model(x), axis=0)

    return scope.run(replica, args=(x,))


@tf.function
def gathered_outside(x):
    return scope.gather(scope.run(lambda x: model(x), args=(x,)), axis=0)


first = next(iter(data))[0]
inside = first if PLAIN else scope.experimental_local_results(gathered(first))[0]
results = {
    "weights": weights(model),
    "losses": losses,
    "total": total,
    "inside": model(first) if PLAIN else inside,
    "outside": model(first) if PLAIN else gathered_outside(first),
}
