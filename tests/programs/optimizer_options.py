"""Clipping of every kind, weight decay, moving averages of weights, accumulation: all act on the global gradient.

The last batch of each epoch holds 7 of 24 samples.
"""

import keras
from common import digits, strategy, weights
from keras import layers, optimizers

scope = strategy()
images, labels = digits(55)
flat = images.reshape(-1, 64)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(optimizer):
    keras.utils.set_random_seed(13)
    with scope.scope():
        hidden = layers.Dense(8, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.8))
        model = keras.Sequential([layers.Input((64,)), hidden, layers.Dense(10, bias_regularizer="l1")])
        model.compile(optimizer(), loss)
    model.fit(flat, labels, batch_size=24, epochs=2, shuffle=False, verbose=0)
    return weights(model)


results = {
    "accumulation_clipnorm": train(lambda: optimizers.SGD(0.5, gradient_accumulation_steps=2, clipnorm=0.1)),
    "decay_average_global_clipnorm": train(
        lambda: optimizers.AdamW(0.01, weight_decay=0.05, use_ema=True, ema_overwrite_frequency=4, global_clipnorm=0.05)
    ),
    "loss_scale_clipvalue": train(
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.5, momentum=0.9, clipvalue=0.02), initial_scale=16.0)
    ),
}
