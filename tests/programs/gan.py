"""A DCGAN as in keras.io's generative examples: two optimizers in one `train_step`, trained by `fit`; no `call`.

The latent noise is drawn in the step and differs between replicas, as it should: ranks are compared, and losses
must be close.
"""

import keras
import tensorflow as tf
from common import change, digits, folder, strategy, weights
from keras import layers, ops

scope = strategy()
images, _ = digits(144)
LATENT = 6


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.seed_generator = keras.random.SeedGenerator(42)

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real):
        count = ops.shape(real)[0]
        latent = keras.random.normal((count, LATENT), seed=self.seed_generator)
        both = ops.concatenate([self.generator(latent), real], axis=0)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))

        latent = keras.random.normal((count, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(ops.zeros((count, 1)), judged)
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


class Samples(keras.callbacks.Callback):
    """Draws from the generator after each epoch, as keras.io's monitor does."""

    def on_epoch_end(self, epoch, logs=None):
        drawn = self.model.generator(keras.random.normal((3, LATENT), seed=epoch))
        self.drawn = ops.convert_to_numpy(drawn)


with scope.scope():
    discriminator = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(4 * 4 * 4),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same"),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    gan = GAN(discriminator, generator)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(0.001),
        g_optimizer=keras.optimizers.Adam(0.001),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )

before = weights(gan.generator)
data = tf.data.Dataset.from_tensor_slices(images).shuffle(200, seed=1).batch(48)
monitor = Samples()
history = gan.fit(data, epochs=2, verbose=0, callbacks=[monitor])
path = folder("gan") / "generator.keras"
gan.generator.save(path)
with scope.scope():
    loaded = keras.models.load_model(path)  # on all ranks, when the chief has written it
results = {
    "close": history.history,
    "ranks_only": {
        "weights": weights(discriminator) + change(generator, before),
        "drawn": monitor.drawn,
        "loaded": weights(loaded),
    },
}
