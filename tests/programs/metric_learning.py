"""Contrastive learning over the batch (SimCLR, metric learning): each image is told from the others of its batch.

The others are those of a replica's own share, so neither the loss nor its gradient is one process's: ranks are
compared. The loss of a batch of n is about log(n), by which it may differ.
"""

import keras
import numpy as np
import tensorflow as tf
from common import digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, _ = digits(96)
noise = np.random.default_rng(8).normal(0, 0.05, images.shape)


class Contrastive(keras.Model):
    def __init__(self, encoder, temperature=0.2):
        super().__init__()
        self.encoder, self.temperature = encoder, temperature
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def train_step(self, data):
        anchors, positives = data
        with tf.GradientTape() as tape:
            a = ops.normalize(self.encoder(anchors, training=True), axis=-1)
            p = ops.normalize(self.encoder(positives, training=True), axis=-1)
            similar = ops.matmul(a, ops.transpose(p)) / self.temperature
            targets = ops.arange(ops.shape(similar)[0])
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(targets, similar, from_logits=True))
        gradients = tape.gradient(loss, self.encoder.trainable_weights)
        self.optimizer.apply(gradients, self.encoder.trainable_weights)
        self.loss_tracker.update_state(loss)
        self.accuracy.update_state(targets, similar)
        return {metric.name: metric.result() for metric in self.metrics}


with scope.scope():
    encoder = keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), layers.Dense(8, "relu"), layers.Dense(4)])
    model = Contrastive(encoder)
    model.compile(keras.optimizers.Adam(0.01))
plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5)
history = model.fit(images, images + noise, batch_size=24, epochs=2, shuffle=False, verbose=0, callbacks=[plateau])
results = {"ranks_only": {"weights": weights(encoder), "history": history.history}}
