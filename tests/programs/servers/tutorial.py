"""In the manner of TensorFlow's tutorial of parameter servers: `fit` with steps of a dataset without end, then a loop.

Strings are looked up in a vocabulary in the dataset; the loop's losses are reduced by the strategy, and its variables
are made by its first step.
"""

import keras
import numpy as np
import tensorflow as tf
from common import folder, strategy

scope = strategy()
rng = np.random.default_rng(3)
GLOBAL_BATCH = 16

x = rng.uniform(size=(64, 10))
data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).shuffle(64, seed=1).repeat().batch(16)
with scope.scope():
    model = keras.Sequential([keras.layers.Dense(10)])  # built by its first batch
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=5)
place = folder("tutorial")
callbacks = [
    keras.callbacks.TensorBoard(log_dir=place / "logs"),
    keras.callbacks.ModelCheckpoint(place / "checkpoint.keras"),
    keras.callbacks.BackupAndRestore(place / "backup"),
]
model.fit(data, epochs=3, steps_per_epoch=10, callbacks=callbacks, verbose=0)

VOCABULARY = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]


def dataset_fn(context):
    lookup = keras.layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=0)
    chosen = rng.integers(0, 7, (64, 3))
    labels = (chosen == 0).any(axis=1, keepdims=True).astype("float64")
    raw = tf.data.Dataset.from_tensor_slices((np.array(VOCABULARY)[chosen], labels))
    batches = raw.shard(context.num_input_pipelines, context.input_pipeline_id).repeat().batch(GLOBAL_BATCH)
    return batches.map(lambda words, label: (lookup(words), label))


with scope.scope():
    classifier = keras.Sequential(
        [keras.layers.Embedding(7, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1, "sigmoid")]
    )
    optimizer = keras.optimizers.RMSprop(0.1)
    accuracy = keras.metrics.BinaryAccuracy()


@tf.function
def train_step(iterator):
    def replica_fn(batch, labels):
        with tf.GradientTape() as tape:
            predictions = classifier(batch, training=True)
            losses = keras.losses.binary_crossentropy(labels, predictions)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, classifier.trainable_variables)
        optimizer.apply_gradients(zip(gradients, classifier.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    return scope.reduce(tf.distribute.ReduceOp.SUM, scope.run(replica_fn, args=next(iterator)), axis=None)


iterator = iter(scope.distribute_datasets_from_function(dataset_fn))
losses_of_loops = [[float(train_step(iterator)) for _ in range(40)]]
