"""State of layers beside what may come between gradients and weights.

Moving statistics travel with gradients, in whatever graph those are summed. Synchronized ones are one process's; those
of shares are not, so of them ranks are compared.
"""

import keras
import numpy as np
import tensorflow as tf
from common import digits, strategy, weights
from keras import layers

scope = strategy()
images, labels = digits(50)
flat = images.reshape(-1, 64)
adam = keras.optimizers.Adam


def scaled(**options):
    return keras.optimizers.LossScaleOptimizer(adam(0.01, **options), initial_scale=64.0, dynamic_growth_steps=3)


class TwoUpdates(keras.Model):
    """Each half has an optimizer of its own, and sees what the other's has done."""

    def __init__(self, synchronized):
        super().__init__()
        self.halves = [half(synchronized), half(synchronized)]

    def call(self, inputs, training=False):
        first, second = (submodel(inputs, training=training) for submodel in self.halves)
        return first + second

    def compile(self, optimizers, **arguments):
        super().compile(optimizers[0], **arguments)
        self.second = optimizers[1]

    def train_step(self, data):
        x, y = data
        for half, optimizer in zip(self.halves, (self.optimizer, self.second), strict=True):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = half.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def half(synchronized):
    return keras.Sequential(
        [
            *(layers.Input((64,)), layers.Dense(8, "tanh"), layers.BatchNormalization(synchronized=synchronized)),
            layers.Dense(10),
        ]
    )


CASES = {
    "accumulated": (half, lambda: adam(0.01, gradient_accumulation_steps=2), {}),
    "scaled": (half, scaled, {}),
    "scaled and accumulated": (half, lambda: scaled(gradient_accumulation_steps=2), {}),
    "averaged and clipped": (half, lambda: scaled(global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2), {}),
    "three steps at once": (half, lambda: adam(0.01), {"steps_per_execution": 3}),
    "compiled": (half, scaled, {"jit_compile": True}),
    "eagerly": (half, scaled, {"run_eagerly": True}),
    "two updates": (TwoUpdates, lambda: [adam(0.01), keras.optimizers.SGD(0.05)], {}),
    "two updates, compiled": (TwoUpdates, lambda: [adam(0.01), keras.optimizers.SGD(0.05)], {"jit_compile": True}),
}


def trained(name, synchronized):
    make, optimizer, arguments = CASES[name]
    keras.utils.set_random_seed(3)
    with scope.scope():
        model = make(synchronized)
        if make is TwoUpdates:
            model.build((None, 64))
        model.compile(optimizer(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **arguments)
    data = tf.data.Dataset.from_tensor_slices((flat, labels)).batch(8)
    model.fit(data, epochs=2, verbose=0)
    return weights(model)


OF_SHARES = ("scaled", "scaled and accumulated", "three steps at once", "compiled", "two updates, compiled")

results = {name: trained(name, True) for name in CASES if name not in OF_SHARES[3:]}
results["ranks_only"] = {name: trained(name, False) for name in OF_SHARES}
assert all(np.isfinite(weight).all() for weight in results["two updates"])
