"""Mixed precision by the global policy, and by a policy of a layer; loss scaling; a custom step that scales itself.

Sums in 16 bits are rounded in another order: equal to one process to 2 in 100.
"""

import keras
import tensorflow as tf
from common import batched, digits, strategy, weights
from keras import layers

scope = strategy()
keras.config.set_floatx("float32")
images, labels = digits(99)
flat = images.reshape(-1, 64).astype("float32")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Scaled(keras.Model):
    """A step as the mixed precision guide writes it: the optimizer scales the loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(value)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return self.compute_metrics(x, y, self(x, training=False))


def train(policy):
    keras.utils.set_random_seed(12)
    keras.mixed_precision.set_global_policy(policy)
    with scope.scope():
        inputs = keras.Input((64,))
        hidden = layers.Dense(16, "tanh")(inputs)
        model = Scaled(inputs, layers.Dense(10, dtype="float32")(hidden))
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    history = model.fit(batched(flat, labels, size=32), epochs=2, verbose=0)
    return {"weights": weights(model), "loss": history.history["accuracy"]}


results = {"float16": train("mixed_float16"), "bfloat16": train("mixed_bfloat16")}
keras.mixed_precision.set_global_policy("float32")
TOLERANCE = 2e-2
