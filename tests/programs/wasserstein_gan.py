"""A conditional WGAN with gradient penalty: several critic steps a batch, second derivatives, two optimizers.

The noise comes with the data, so that all of it can be compared with one process.
"""

import keras
import numpy as np
import tensorflow as tf
from common import digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, labels = digits(99)
one_hot = keras.utils.to_categorical(labels, 10)
rng = np.random.default_rng(0)
latent, mixing = rng.normal(size=(99, 4)), rng.uniform(size=(99, 1, 1, 1))


def with_condition(images, classes):
    planes = ops.repeat(ops.repeat(classes[:, None, None, :], 8, axis=1), 8, axis=2)
    return ops.concatenate([images, planes], axis=-1)


class ConditionalWGAN(keras.Model):
    def __init__(self, critic, generator, critic_steps=2, penalty=10.0):
        super().__init__()
        self.critic, self.generator = critic, generator
        self.critic_steps, self.penalty = critic_steps, penalty

    def compile(self, c_optimizer, g_optimizer):
        super().compile()
        self.c_optimizer, self.g_optimizer = c_optimizer, g_optimizer

    def gradient_penalty(self, real, fake, classes, mixing):
        between = real + mixing * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(with_condition(between, classes), training=True)
        slope = tape.gradient(judged, between)
        norm = ops.sqrt(ops.sum(ops.square(slope), axis=(1, 2, 3)) + 1e-12)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, data):
        real, classes, latent, mixing = data
        seeds = ops.concatenate([latent, classes], axis=1)
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(seeds, training=True)
                cost = ops.mean(self.critic(with_condition(fake, classes), training=True))
                cost -= ops.mean(self.critic(with_condition(real, classes), training=True))
                cost += self.penalty * self.gradient_penalty(real, fake, classes, mixing)
            variables = self.critic.trainable_variables
            self.c_optimizer.apply_gradients(zip(tape.gradient(cost, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            fake = self.generator(seeds, training=True)
            g_cost = -ops.mean(self.critic(with_condition(fake, classes), training=True))
        variables = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_cost, variables), variables, strict=True))
        return {"critic": cost, "generator": g_cost}


with scope.scope():
    critic = keras.Sequential(
        [
            layers.Input((8, 8, 11)),
            layers.Conv2D(4, 3, strides=2),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [layers.Input((14,)), layers.Dense(64, activation="sigmoid"), layers.Reshape((8, 8, 1))]
    )
    gan = ConditionalWGAN(critic, generator)
    gan.compile(keras.optimizers.Adam(2e-3, beta_1=0.5), keras.optimizers.RMSprop(2e-3))

data = tf.data.Dataset.from_tensor_slices((images, one_hot, latent, mixing)).batch(33)
history = gan.fit(data, epochs=2, verbose=0)
results = {"critic": weights(critic), "generator": weights(generator), "history": history.history}
