"""A variational autoencoder as in keras.io's generative examples: own `train_step`, trackers, no `call`.

The sampled noise differs between replicas, as it should, so one process's cannot be expected; what is compared with
it is an autoencoder of the same form without noise.
"""

import keras
import tensorflow as tf
from common import change, digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, _ = digits(144)


class Sampling(layers.Layer):
    def __init__(self, noise, **kwargs):
        super().__init__(**kwargs)
        self.noise = noise
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + self.noise * ops.exp(0.5 * log_var) * epsilon


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total = keras.metrics.Mean(name="total_loss")
        self.reconstruction = keras.metrics.Mean(name="reconstruction_loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.reconstruction, self.kl]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            restored = self.decoder(z)
            reconstruction = ops.mean(ops.sum(keras.losses.binary_crossentropy(data, restored), axis=(1, 2)))
            kl = ops.mean(ops.sum(-0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var)), axis=1))
            loss = reconstruction + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.reconstruction.update_state(reconstruction)
        self.kl.update_state(kl)
        return {
            "loss": self.total.result(),
            "reconstruction_loss": self.reconstruction.result(),
            "kl_loss": self.kl.result(),
        }


def build(noise):
    keras.utils.set_random_seed(5)
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
    x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
    mean, log_var = layers.Dense(2, name="mean")(x), layers.Dense(2, name="log_var")(x)
    encoder = keras.Model(inputs, [mean, log_var, Sampling(noise)([mean, log_var])], name="encoder")
    latent = keras.Input((2,))
    x = layers.Reshape((4, 4, 4))(layers.Dense(64, activation="relu")(latent))
    x = layers.Conv2DTranspose(1, 3, strides=2, activation="sigmoid", padding="same")(x)
    return VAE(encoder, keras.Model(latent, x, name="decoder"))


def train(noise):
    with scope.scope():
        vae = build(noise)
        vae.compile(optimizer=keras.optimizers.SGD(0.001, momentum=0.9))
    before = weights(vae)
    history = vae.fit(images, epochs=3, batch_size=48, shuffle=False, verbose=0)
    return vae, history.history, change(vae, before)


_, history, moved = train(noise=1.0)
results = {"ranks_only": {"moved": moved}, "close": history}
model, history, moved = train(noise=0.0)
results["without_noise"] = {"history": history, "moved": [part for part in moved if part.dtype.kind == "f"]}
latent = model.encoder.predict(images, batch_size=50, verbose=0)[0]
results["latent"], results["decoded"] = latent, model.decoder(latent[:5])
