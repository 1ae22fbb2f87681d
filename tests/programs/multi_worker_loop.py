"""A custom loop as TensorFlow's multi-worker tutorial has it: the first `apply_gradients` inside ``strategy.run``.

Datasets from a function, one shard a worker; losses summed by ``strategy.reduce``; checkpoints by
`tf.train.CheckpointManager`, written by each worker to a directory of its own, as the tutorial says. Shards take
samples in turn, so the shares of a step are together one process's batch.
"""

import os

import keras
import tensorflow as tf
from common import PLAIN, digits, folder, strategy, weights

scope = strategy()
images, labels = digits(96)
GLOBAL_BATCH = 24
rank = 0 if PLAIN else scope.rank


def dataset_fn(context):
    batch = context.get_per_replica_batch_size(GLOBAL_BATCH)
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(batch)


with scope.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.RMSprop(learning_rate=0.001)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    data = scope.distribute_datasets_from_function(dataset_fn)


@tf.function
def train_step(iterator):
    def step_fn(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            losses = loss_object(y, predictions)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, predictions)
        return loss

    per_replica = scope.run(step_fn, args=(next(iterator),))
    return scope.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)


epoch, step_in_epoch = tf.Variable(0, dtype=tf.int64), tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(model=model, epoch=epoch, step_in_epoch=step_in_epoch)
place = folder("multi_worker_loop") / ("chief" if rank == 0 else f"workertemp_{rank}")
manager = tf.train.CheckpointManager(checkpoint, directory=str(place), max_to_keep=1)

losses, accuracies = [], []
while epoch.numpy() < 2:
    iterator = iter(data)
    while step_in_epoch.numpy() < 96 // GLOBAL_BATCH:
        losses.append(float(train_step(iterator)))
        step_in_epoch.assign_add(1)
    accuracies.append(float(accuracy.result()))
    accuracy.reset_state()
    manager.save()
    epoch.assign_add(1)
    step_in_epoch.assign(0)

trained = weights(model)
for variable in model.trainable_variables:
    variable.assign(tf.zeros_like(variable))
checkpoint.restore(manager.latest_checkpoint)
results = {
    "losses": losses,
    "weights": trained,
    "accuracy": accuracies,
    "same_after_restore": all((a == b).all() for a, b in zip(trained, weights(model), strict=True)),
    "files": len([name for name in os.listdir(place) if name.endswith(".index")]),
}
