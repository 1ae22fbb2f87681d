"""Cases of optimizers."""

import keras
import tensorflow as tf
from world import X, Y, batched, case, fitted, mlp, numbers, spread, strategy

from tfdist.optimizers import GradientNoise

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.01},
    "Adadelta": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 0.1},
    "Adamax": {},
    "Adafactor": {},
    "Nadam": {},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {"learning_rate": 1e-3},
    "Lamb": {},
    "Muon": {"exclude_layers": ["dense_out"]},
}


def optimizer_case(name, settings):
    def run():
        return fitted(mlp(lambda: getattr(keras.optimizers, name)(**settings)), X[:75], Y[:75], epochs=2)

    run.__name__ = f"optimizer_{name}"
    (spread if name in ("SGD", "Adam") else case)(run)


for name, settings in OPTIMIZERS.items():
    if hasattr(keras.optimizers, name):
        optimizer_case(name, settings)


@case
def clipping_that_does_nothing():
    return fitted(mlp(lambda: keras.optimizers.SGD(0.1, clipnorm=1e6)))


@spread
def clipping_by_global_norm():
    return fitted(mlp(lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1e-2)))


@spread
def clipping_by_norm():
    return fitted(mlp(lambda: keras.optimizers.Adam(clipnorm=1e-2, weight_decay=0.01)))


@case
def clipping_by_value():
    return fitted(mlp(lambda: keras.optimizers.SGD(0.1, clipvalue=1e-3)))


@case
def weight_decay_and_ema():
    def optimizer():
        return keras.optimizers.Adam(weight_decay=0.02, use_ema=True, ema_overwrite_frequency=3)

    return fitted(mlp(optimizer))


@spread
def gradient_accumulation():
    return fitted(mlp(lambda: keras.optimizers.Adam(gradient_accumulation_steps=2, clipnorm=0.01)))


@spread
def gradient_noise_that_all_draw_alike():
    """Added to the sum, before it is clipped."""
    noise = {"structure": "isotropic", "stddev": 0.01}
    return fitted(mlp(lambda: GradientNoise(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3), **noise)))


def noisy_adam(ratio, structure):
    return lambda: GradientNoise(keras.optimizers.Adam(gradient_accumulation_steps=2, clipnorm=1.0), ratio, structure)


@spread
def gradient_noise_of_parts():
    """Each replica's noise is its own; where there is little, weights are nearly those of one process."""
    much = fitted(mlp(noisy_adam(8, "trace")), X[:75], Y[:75])
    return {"ranks_only": much, "low": fitted(mlp(noisy_adam(1 + 1e-6, "diagonal")), X[:75], Y[:75])}


@case
def learning_rate_schedule():
    return fitted(mlp(lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5))))


@case
def loss_scale_optimizer():
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)

    return fitted(mlp(optimizer))


class InfiniteOnOneRank(keras.layers.Layer):
    """Makes one sample's gradient infinite: one rank has it, all must skip the step."""

    def call(self, inputs):
        return inputs * tf.where(inputs[:, :1] > 1e6, inputs.dtype.max, 1.0)


@case
def an_infinity_on_one_rank():
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), InfiniteOnOneRank(), keras.layers.Dense(10)])
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    poisoned = X.copy()
    poisoned[40, 0] = 1e7  # in the second batch, on the first rank
    model.fit(batched(poisoned[:96], Y[:96]), epochs=1, verbose=0)
    scale = float(model.optimizer.dynamic_scale.numpy())
    return {**numbers(model), "scale": scale, "steps": int(model.optimizer.step_counter.numpy())}
