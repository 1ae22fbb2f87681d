"""Denoising diffusion as in keras.io: a network and its moving average, which the step updates by hand; two losses.

The noise comes with the data, so that all of it can be compared with one process; its rates do, too.
"""

import keras
import numpy as np
import tensorflow as tf
from common import Logs, digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, _ = digits(72)
rng = np.random.default_rng(9)
noises, times = rng.normal(size=images.shape), rng.uniform(size=(72, 1, 1, 1))


class Sinusoids(layers.Layer):
    def call(self, variance):
        return ops.concatenate([ops.sin(3 * variance), ops.cos(3 * variance)], axis=-1)


def network():
    noisy, variance = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    x = layers.Concatenate()([noisy, layers.UpSampling2D(8)(Sinusoids()(variance))])
    x = layers.Conv2D(6, 3, padding="same", activation="swish")(x)
    x = layers.BatchNormalization(center=False, scale=False, synchronized=True)(x)
    return keras.Model([noisy, variance], layers.Conv2D(1, 3, padding="same", kernel_initializer="zeros")(x))


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = network()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_tracker = keras.metrics.Mean(name="n_loss")
        self.image_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_tracker, self.image_tracker]

    def denoise(self, noisy, noise_rate, signal_rate, training):
        chosen = self.network if training else self.ema_network
        noise = chosen([noisy, noise_rate**2], training=training)
        return noise, (noisy - noise_rate * noise) / signal_rate

    def train_step(self, data):
        images, noises, times = data
        images = self.normalizer(images, training=True)
        angle = 0.3 + times
        signal_rate, noise_rate = ops.cos(angle), ops.sin(angle)
        noisy = signal_rate * images + noise_rate * noises
        with tf.GradientTape() as tape:
            noise, image = self.denoise(noisy, noise_rate, signal_rate, training=True)
            noise_loss = self.loss(noises, noise)
            image_loss = self.loss(images, image)
        variables = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(noise_loss, variables), variables, strict=True))
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights, strict=True):
            ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


with scope.scope():
    model = Diffusion()
    model.normalizer.adapt(images)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2, weight_decay=1e-3), loss=keras.losses.MeanAbsoluteError())

logs = Logs()
data = tf.data.Dataset.from_tensor_slices((images, noises, times)).batch(24)
model.fit(data, epochs=2, verbose=0, callbacks=[logs])
results = {"network": weights(model.network), "average": weights(model.ema_network), "logs": logs.seen}
